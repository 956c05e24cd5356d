"""`spawned.py PORT`: ranks of multiprocessing.spawn make a group on this port and on the next.

Run by test_torch_launch.py.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono.torch  # noqa: F401


def rank_main(rank: int, port: int) -> None:
    for attempt in range(2):
        address = f"tcp://127.0.0.1:{port + attempt}"
        dist.init_process_group("unisono", init_method=address, rank=rank, world_size=2)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x[0] == 2
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (int(sys.argv[1]),), nprocs=2)
    print("fine")
