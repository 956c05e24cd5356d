"""A rank of multiprocessing fails in DDP; the parent must raise its error. Run by test_torch_launch.py.

`one_spawned_rank_fails.py FOLDER START_METHOD RANKS:ATTEMPTS ...`
"""

import gc
import importlib
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import unisono.torch  # noqa: F401


def rank_main(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    net = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(10):
        if rank == 1 and step == 5:
            raise ValueError("bad loss")
        net(torch.ones(2, 8)).sum().backward()


def main(place: str, start: str, *jobs: str) -> None:
    if start == "fork":  # DDP imports it, which takes seconds: once, before the ranks are forked
        importlib.import_module("torch._dynamo")
        gc.freeze()  # at their end the ranks need not look through all that PyTorch has made
    for job in jobs:
        ranks, attempts = map(int, job.split(":"))
        for attempt in range(attempts):
            names = [f"{place}/{ranks}-{attempt}-{again}" for again in range(2)]
            assert any(shows_the_failed_rank(name, start, ranks) for name in names)
    print("fine")


def shows_the_failed_rank(folder: str, start: str, ranks: int) -> bool:
    """False: another rank's error, on an overloaded machine. A rank waits 2 s for the end of the one that
    failed, which may need longer. If the parent runs only when both have ended, PyTorch names the lower rank.
    """
    os.mkdir(folder)
    try:
        mp.start_processes(rank_main, (folder, ranks), nprocs=ranks, start_method=start)
    except mp.ProcessRaisedException as error:
        if error.error_index != 1:
            print(f"not the error of rank 1: {error}", file=sys.stderr)
            return False
        assert "ValueError: bad loss" in str(error), error
        return True
    raise AssertionError("no rank failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
