"""A group of one over a HashStore, which only threads of one process can share."""

from pathlib import Path

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401


def main(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("unisono", store=dist.HashStore(), rank=rank, world_size=size)
    dist.all_reduce(x := torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    print("fine" if x.tolist() == [1.0, 1.0] else x)
