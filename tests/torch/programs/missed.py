"""Rank 0 tries to make a group that rank 1 does not join; then both make one. Run by suite.py."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono as un
import unisono.torch


def main(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    ours = {"rank": rank, "world_size": size, "store": store}
    failed = folder / "failed"
    for attempt in range(2):
        if rank == 0:
            try:
                dist.init_process_group("unisono", timeout=timedelta(seconds=0.5), **ours)
            except un.UnisonoError as error:
                assert "rank 1" in str(error), error
            failed.with_suffix(f".{attempt}").touch()
    while not failed.with_suffix(".1").exists():
        time.sleep(0.01)
    dist.init_process_group("unisono", timeout=timedelta(seconds=20), **ours)
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    assert x.item() == size
    dist.destroy_process_group()
    print("fine")
