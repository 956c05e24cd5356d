"""`dist.shrink_group` over "nccl" on virtual GPUs: what PyTorch's own tests of it ask of NCCL.

Source: the shrink tests of PyTorch's test/distributed/test_c10d_nccl.py. Arguments: a scenario.
"""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK)


def begin(bound: bool = True) -> None:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE if bound else None, timeout=timedelta(seconds=300))
    dist.all_reduce(torch.ones(1, device=DEVICE))


def total(group: dist.ProcessGroup) -> int:
    x = torch.full((1,), RANK, device=DEVICE)
    dist.all_reduce(x, group=group)
    return int(x.item())


def shrink(excluded: list[int], flags: int = 0, bound: bool = True) -> None:
    """Excluded ranks leave at once; the others have what is left."""
    begin(bound)
    if RANK in excluded:
        if flags == SHRINK_ABORT:
            dist.group.WORLD._get_backend(DEVICE).abort()
        dist.destroy_process_group()
        return
    before = dist.group.WORLD._get_backend(DEVICE).options
    made = dist.shrink_group(excluded, shrink_flags=flags)
    left = [rank for rank in range(SIZE) if rank not in excluded]
    assert made is dist.group.WORLD
    assert (made.size(), made.rank()) == (len(left), left.index(RANK))
    assert total(made) == sum(left)
    after = made._get_backend(DEVICE).options
    assert after._timeout == before._timeout
    assert after.is_high_priority_stream == before.is_high_priority_stream
    part = dist.new_group([0])
    if made.rank() == 0:
        assert total(part) == RANK
    dist.barrier()
    dist.destroy_process_group()


def basic() -> None:
    shrink([1])


def first() -> None:
    shrink([0])


def unbound() -> None:
    shrink([SIZE - 1], bound=False)


def several() -> None:
    shrink([0, 2] if SIZE > 2 else [0])


def aborted() -> None:
    shrink([1], SHRINK_ABORT)


def options() -> None:
    begin()
    if RANK == SIZE - 1:
        dist.destroy_process_group()
        return
    given = dist.ProcessGroupNCCL.Options()
    given.is_high_priority_stream = not dist.group.WORLD._get_backend(DEVICE).options.is_high_priority_stream
    given.config.blocking = 0
    found = dist.shrink_group([SIZE - 1], pg_options=given)._get_backend(DEVICE).options
    assert found.is_high_priority_stream == given.is_high_priority_stream
    assert found.config.blocking == 0
    dist.destroy_process_group()


def subgroup() -> None:
    """A subgroup shrinks to one rank, the world goes on; then the world shrinks."""
    begin()
    part = dist.new_group([0, 1])
    if RANK == 0:
        assert total(dist.shrink_group([1], group=part)) == 0
    dist.barrier()
    if RANK != SIZE - 1:
        assert total(dist.shrink_group([SIZE - 1])) == sum(range(SIZE - 1))
    dist.destroy_process_group()


def repeated() -> None:
    begin()
    for size in range(SIZE - 1, 0, -1):
        if dist.get_rank() == size:
            break
        assert total(dist.shrink_group([size])) == sum(range(size))
    dist.destroy_process_group()


def validated() -> None:
    begin()
    for given in ([], [0, 0], [SIZE + 1]):
        with pytest.raises(ValueError):
            dist.shrink_group(given)
    dist.destroy_process_group()


globals()[sys.argv[1]]()
print("fine")
