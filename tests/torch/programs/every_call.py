"""Every kind of call of a process group, with results that are known. For programs whose groups change."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def check(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Every kind of call. ranks: the world's numbers of the group's ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    assert (size, rank) == (len(ranks), ranks.index(dist.get_rank()))
    assert dist.get_process_group_ranks(group) == ranks
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, group=group)
    total = size * (size + 1) / 2
    assert x.tolist() == [total] * 3
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work.get_future().wait()[0].tolist() == [total * size] * 3
    x = torch.full((2,), float(rank))
    dist.broadcast(x, ranks[-1], group=group)
    assert x.tolist() == [size - 1] * 2
    gathered = [torch.empty(1) for _ in ranks]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    assert torch.cat(gathered).tolist() == list(range(size))
    dist.gather(torch.tensor([float(rank)]), gathered if rank == 0 else None, ranks[0], group=group)
    out = torch.empty(1)
    dist.scatter(out, gathered if rank == 0 else None, ranks[0], group=group)
    assert out.item() == rank
    dist.reduce_scatter(out, [torch.full((1,), float(each)) for each in range(size)], group=group)
    assert out.item() == rank * size
    dist.reduce(out, ranks[-1], group=group)
    mixed = torch.empty(size)
    dist.all_to_all_single(mixed, torch.full((size,), float(rank)), group=group)
    assert mixed.tolist() == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": each} for each in range(size)]
    if size > 1:
        left, right = ranks[rank - 1], ranks[(rank + 1) % size]
        sent = dist.isend(torch.tensor([float(rank)]), right, group=group)
        dist.recv(out, left, group=group)
        sent.wait()
        assert out.item() == (rank - 1) % size
    assert functional.all_reduce(torch.ones(1), "sum", group).item() == size
    dist.barrier(group=group)
    group.monitored_barrier(timedelta(seconds=300))
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    model(torch.full((1, 1), float(rank))).sum().backward()
    assert abs(model.module.weight.grad.item() - (size - 1) / 2) < 1e-6
