"""Ranks make a group on a port, leave it, and make one on the next port. Run by test_torch_launch.py."""

from pathlib import Path

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401


def main(rank: int, size: int, folder: Path, port: str) -> None:
    for attempt in range(2):
        address = f"tcp://127.0.0.1:{int(port) + attempt}"
        dist.init_process_group("unisono", init_method=address, rank=rank, world_size=size)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x[0] == size
        dist.destroy_process_group()
    print("fine")
