"""Rank 0 tries to make a group that rank 1 does not join; then both make one. Run by suite.py.

Without `init_process_group`: PyTorch counts its attempts in each process, so there every rank must make all.
"""

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono as un
from unisono.torch.process_group import ProcessGroupUnisono


def main(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    failed = folder / "failed"
    for attempt in range(2):
        if rank == 0:
            try:
                ProcessGroupUnisono(store, rank, size, timedelta(seconds=0.5), "mine")
            except un.UnisonoError as error:
                assert "rank 1" in str(error), error
            failed.with_suffix(f".{attempt}").touch()
    while not failed.with_suffix(".1").exists():
        time.sleep(0.01)
    group = ProcessGroupUnisono(store, rank, size, timedelta(seconds=300), "mine")
    x = torch.ones(1)
    group.allreduce([x]).wait()
    assert x.item() == size
    group.shutdown()
    print("fine")
