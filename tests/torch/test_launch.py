"""How ranks are started: torchrun, multiprocessing.spawn."""

from __future__ import annotations

import subprocess
import sys

import suite
from ports import reserved

EXAMPLE = suite.HERE.parents[1] / "examples" / "ddp.py"
SPAWN = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import unisono.torch

def rank_main(rank, port):
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
"""


def run(*arguments: str, limit_s: float = 110) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_spawn_and_a_new_port(tmp_path):
    path = tmp_path / "spawn.py"
    path.write_text(SPAWN)
    with reserved(2) as port:
        assert "fine" in run(str(path), str(port))


def test_the_example_under_torchrun(tmp_path):
    arguments = ["--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--epochs", "2"]
    out = run("-m", "torch.distributed.run", *arguments, "--save", str(tmp_path / "net.pt"))
    assert "epoch 1: loss" in out
    assert (tmp_path / "net.pt").exists()
