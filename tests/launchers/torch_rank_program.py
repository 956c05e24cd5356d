"""One rank of PyTorch's launchers: `python torch_rank_program.py [CASE]`, cases as in rank_program.py.

spawn  starts two ranks itself, by torch.multiprocessing.spawn, on the port given
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def train(case: str) -> None:
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3, 4), rank + 1.0)
    dist.all_reduce(x)
    sys.stdout.write(f"rank {rank} of {size} on {os.uname().nodename}: {x[2, 3].item():g}\n")
    sys.stdout.flush()
    if case == "dies" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "dies":
        dist.all_reduce(x)
    dist.destroy_process_group()


def spawned(rank: int, size: int, port: str, case: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    train(case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="?", default="sum")
    parser.add_argument("--spawn", metavar="PORT")
    arguments = parser.parse_args()
    if arguments.spawn:
        torch.multiprocessing.spawn(spawned, args=(2, arguments.spawn, arguments.case), nprocs=2)
    else:
        train(arguments.case)
