"""Launchers start this file in several ways. `launches.py NAME`."""

import os
import secrets
import subprocess
import sys

import torch
import torch.distributed as dist
from told import say

import unisono as un


def total() -> None:
    """The program that is launched."""
    dist.init_process_group("unisono")
    x = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(x)
    node = dist.get_rank() // int(os.environ["LOCAL_WORLD_SIZE"])
    say(f"{dist.get_world_size()} ranks, sum {x.item()}, rank 0 on node {node}")
    dist.destroy_process_group()


def nodes() -> None:
    """Two nodes of two ranks, each started by a command of its own: PyTorch's module, and ours."""
    os.environ["UNISONO_TOKEN"] = secrets.token_hex(32)  # of both nodes
    for words in (["torch.distributed.launch"], ["unisono", "run"]):
        with un.TCPStore("127.0.0.1", 0, is_server=True) as taken:
            port = taken.port
        began = [start(words, node, port) for node in range(2)]
        printed = [one.communicate() for one in began]
        assert all(one.returncode == 0 for one in began), printed
        say(f"{words[0]}:", printed[0][0].strip().removeprefix("[rank 0] "))


def start(words: list[str], node: int, port: int) -> subprocess.Popen[str]:
    where = ["--nproc-per-node=2", "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1"]
    command = [sys.executable, "-m", *words, *where, f"--master-port={port}", __file__, "total"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun() -> None:
    """torchrun, python -m torch.distributed.run and unisono run take one spelling."""
    for words in (("-m", "torch.distributed.run"), ("-m", "unisono", "run")):
        done = subprocess.run(
            [sys.executable, *words, "--nproc-per-node=2", __file__, "total"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        say(f"{words[1]}:", done.stdout.strip().removeprefix("[rank 0] "))


def share(world: un.Group) -> int:
    return world.all_reduce(world.rank + 1)


def ray() -> None:
    import ray

    import unisono.ray

    ray.init(num_cpus=2, log_to_driver=False)
    say(unisono.ray.run(share, num_workers=2))


if __name__ == "__main__":
    [name] = [word for word in sys.argv[1:] if not word.startswith("--")]  # PyTorch adds --local-rank=0
    globals()[name]()
