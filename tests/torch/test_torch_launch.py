"""How ranks are started: torchrun, multiprocessing.spawn."""

from __future__ import annotations

import subprocess
import sys

import pytest

import suite
from effort import times
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


FAILS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import unisono.torch
from torch.nn.parallel import DistributedDataParallel

def rank_main(rank, folder, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    net = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(10):
        if rank == 1 and step == 5:
            raise ValueError("bad loss")
        net(torch.ones(2, 8)).sum().backward()

if __name__ == "__main__":
    ranks = int(sys.argv[3])
    for attempt in range(int(sys.argv[4])):
        folder = f"{sys.argv[1]}/{attempt}"
        os.mkdir(folder)
        try:
            mp.start_processes(rank_main, (folder, ranks), nprocs=ranks, start_method=sys.argv[2])
        except mp.ProcessRaisedException as error:
            assert error.error_index == 1 and "ValueError: bad loss" in str(error), error
    print("fine")
"""
OWN_HOOK = """
import torch, torch.distributed as dist
import unisono.torch
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("unisono")
net = DistributedDataParallel(torch.nn.Linear(8, 8))

def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

net.register_comm_hook(None, hook)
for step in range(10):
    if dist.get_rank() == 1 and step == 5:
        raise ValueError("bad loss")
    net(torch.ones(2, 8)).sum().backward()
"""
LEAVES = """
import os, sys
import torch, torch.distributed as dist
import torch._dynamo, unisono.torch.process_group  # takes seconds: once, before the ranks are forked

for attempt in range(int(sys.argv[2])):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            store = dist.FileStore(f"{sys.argv[1]}/{attempt}", 2)
            dist.init_process_group("unisono", store=store, rank=rank, world_size=2)
            dist.barrier()
            if rank == 0:
                works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
                futures = [work.get_future().then(lambda future: future.value()) for work in works]
            else:
                store.wait(["left"])
            store.set("left", "")
            sys.exit()
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ends == [0, 0], ends
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


@pytest.mark.parametrize(
    ("start", "ranks", "attempts"), [("spawn", 2, 1), ("spawn", 4, 1), ("fork", 2, 8), ("fork", 4, 3)]
)
def test_the_parent_shows_the_error_of_the_rank_that_failed(tmp_path, start, ranks, attempts):
    """Not the error of those that were waiting for it, whose processes must not end first."""
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    assert "fine" in run(str(path), str(tmp_path), start, str(ranks), str(attempts))


def test_the_launcher_shows_our_error_where_pytorch_keeps_its_text_alone(tmp_path):
    """DDP raises a RuntimeError for what a future failed with that a hook of the user's has asked for."""
    path = tmp_path / "own_hook.py"
    path.write_text(OWN_HOOK)
    command = ["-m", "unisono", "run", "-n", "2", "--grace", "100", str(path)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, check=False
    )
    said = done.stderr
    assert "\n  unisono.errors.PeerLost: all_reduce failed: rank 1 (pid " in said, said
    assert "has closed the group because of ValueError: bad loss" in said, said
    assert "Got the following error" not in said, said
    first, last = said.splitlines()[-2:]
    assert first == "  ValueError: bad loss", said
    assert last == "unisono run: then rank 0 failed because rank 1 was gone (exit code 1)", said


def test_leaving_with_works_under_way_ends_no_process(tmp_path):
    """Their futures fail while the interpreter ends; PyTorch's C++ must not meet that on its own."""
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES)
    assert "fine" in run(str(path), str(tmp_path), str(times(usual=2, long=6)))
