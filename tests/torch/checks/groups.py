"""Groups, names, object collectives, mesh."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import inside


def check_who(rank, size):
    group = dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "unisono")
    assert (group.rank(), group.size(), group.name()) == (rank, size, "unisono")
    assert group._get_backend_name() == "unisono"
    assert dist.distributed_c10d._get_process_group_name(group) == group.group_name
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group.group_desc == "default_pg"
    assert group._get_backend(torch.device("cpu")) is group
    assert group.options._timeout == timedelta(seconds=120)
    assert group.bound_device_id is None
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("cuda"))


def check_new_group(rank, size):
    everybody = dist.new_group()
    last = dist.new_group([size - 2, size - 1])
    alone = [dist.new_group([r]) for r in range(size)]
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=everybody)
    assert x[0] == sum(range(size))
    if rank >= size - 2:
        assert dist.get_rank(last) == rank - (size - 2)
        y = torch.full((3,), float(rank))
        dist.broadcast(y, size - 2, group=last)
        assert y[0] == size - 2
        dist.broadcast(y, group=last, group_src=1)
        dist.destroy_process_group(last)
    else:
        assert last == dist.GroupMember.NON_GROUP_MEMBER
    dist.all_reduce(x, group=alone[rank])
    assert x[0] == sum(range(size))


def check_the_store_forgets_groups(rank, size):
    store = dist.distributed_c10d._get_default_store()
    kept = []
    for _ in range(10):
        group = dist.new_group()
        hashed = dist.new_group(use_local_synchronization=True)  # of the same name each time
        dist.all_reduce(x := torch.ones(1), group=hashed)
        assert x.item() == size
        dist.destroy_process_group(hashed)
        dist.destroy_process_group(group)
        dist.barrier()
        kept.append(store.num_keys())
        dist.barrier()
    assert kept == kept[:1] * 10, kept


def check_long_timeouts(rank, size):
    for timeout in (timedelta(days=10_000), timedelta(seconds=180_000_000)):
        group = dist.new_group(timeout=timeout)
        dist.all_reduce(x := torch.ones(1), group=group)
        assert x.item() == size
        dist.distributed_c10d._set_pg_timeout(timeout, group)
        dist.barrier(group=group)
        assert group.options._timeout == timeout
        dist.destroy_process_group(group)


def check_several_groups_in_any_order(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    works = [dist.all_reduce(torch.ones(10_000), group=group, async_op=True) for group in groups]
    for work in works if rank % 2 else works[::-1]:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)


def check_sequence_number(rank, size):
    group = dist.new_group()
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), group=group)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert group._get_sequence_number_for_group() == before + 2
    work.wait()
    dist.barrier(group=group)
    assert group._get_sequence_number_for_group() == before + 3 == inside.group_of(group).sequence


def check_split(rank, size):
    split = dist.group.WORLD.split_group([0, 1], group_name="pair")
    if rank > 1:
        assert split is None
        return
    x = torch.ones(1)
    split.allreduce([x]).wait()
    assert x.item() == 2
    assert split.group_name == "pair"
    split.shutdown()


def check_merge(rank, size):
    """Groups that do not know of each other: of rank 0 and of the rest."""
    world = dist.group.WORLD
    part = world.split_group([0] if rank == 0 else list(range(1, size)))
    store = dist.PrefixStore("merged", world.get_group_store())
    merged = part.merge_remote_group(store, size, timedelta(seconds=15), group_name="all")
    assert (merged.size(), merged.group_name, merged.group_desc) == (size, "all", "default_pg:split:merge")
    every = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
    merged.allgather([every], [torch.tensor([merged.rank(), rank])]).wait()
    assert [row[0] for row in every] == list(range(size))
    assert sorted(int(row[1]) for row in every) == list(range(size))
    with pytest.raises(ValueError, match=rf"got \d ranks, expected size={size}\. Give"):
        part.merge_remote_group(store, size)
    for group in (merged, part):
        group.shutdown()


def check_what_pytorch_has_for_nccl_only(rank, size):
    with pytest.raises(RuntimeError, match="get_future"):
        dist.group.WORLD._register_on_completion_hook(print)


def check_objects(rank, size):
    mine = {"rank": rank, "text": "x" * rank * 1000, "nothing": None}
    every = [None] * size
    dist.all_gather_object(every, mine)
    assert [each["rank"] for each in every] == list(range(size))
    assert every[-1]["text"] == "x" * (size - 1) * 1000

    gathered = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert rank != 1 or gathered[0]["rank"] == 0

    both = [mine, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(both, 0)
    assert both[1] == 0

    out = [None]
    dist.scatter_object_list(out, [f"to {r}" for r in range(size)] if rank == 0 else None, 0)
    assert out == [f"to {rank}"]

    if rank == 0:
        dist.send_object_list([mine, "b"], dst=1)
    elif rank == 1:
        received = [None, None]
        assert dist.recv_object_list(received, src=0) == 0
        assert received[1] == "b"


def check_mesh(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("dp"))
    assert x[0] == size
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    dist.all_reduce(x, group=two["b"].get_group())
    assert x[0] == size * size


def check_timeout_setting(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=7))
    assert group.options._timeout == timedelta(seconds=7)
    group.set_timeout(timedelta(seconds=9))
    assert group.options._timeout == timedelta(seconds=9)
