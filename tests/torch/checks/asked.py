"""What PyTorch says of a group and of its backends, what it does around them, and a breakpoint."""

import os

import pytest
import torch
import torch.distributed as dist


def check_backends(rank, size):
    assert dist.is_backend_available("unisono")
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert not dist.is_mpi_available()
    assert not dist.is_ucc_available()
    assert not dist.is_torchelastic_launched()
    assert dist.get_node_local_rank(fallback_rank=rank) == rank
    assert dist.GroupMember.WORLD is dist.group.WORLD is dist.distributed_c10d._get_default_group()


def check_what_a_group_answers(rank, size):
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert group.get_group_store().num_keys() > 0
    assert group._backend_id(dist.ProcessGroup.BackendType.CUSTOM) == id(group)
    assert group.bound_device_id is None
    assert not group._has_hooks()
    group._wait_for_pending_works()
    assert dist.ProcessGroup.unbox(group.boxed()) is group


def check_abort(rank, size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()  # an abort also ends what others have not finished
    group.abort()
    with pytest.raises(RuntimeError, match=r"closed|abort"):
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def check_breakpoint(rank, size):
    reading, writing = os.pipe()
    os.write(writing, b"p 6 * 7\ncontinue\n")
    os.close(writing)
    stdin = os.dup(0)
    os.dup2(reading, 0)
    try:
        dist.breakpoint(rank=1, timeout_s=None)
    finally:
        os.dup2(stdin, 0)
        os.close(reading)
        os.close(stdin)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size
