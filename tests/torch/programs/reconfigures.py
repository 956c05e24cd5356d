"""Three processes train; the first dies, and a fourth takes its place. Run by suite.py."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unisono.torch as ut
from unisono.errors import PeerLost


def handles(folder: Path, numbers: list[int], number: int) -> list[str]:
    """Exchange handles by files."""
    (folder / f"part{number}").write_text(ut.get_reconfigure_handle())
    (folder / f"part{number}").rename(folder / f"handle{number}")
    paths = [folder / f"handle{each}" for each in numbers]
    while not all(path.exists() for path in paths):
        time.sleep(0.001)
    return [path.read_text() for path in paths]


def step(number: int) -> float:
    """One step of DDP; the gradient of the weight, averaged over the ranks."""
    layer = torch.nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(layer)
    model(torch.full((1, 1), float(number))).sum().backward()
    return layer.weight.grad.item()


def main(rank: int, size: int, folder: Path, first: str) -> None:
    options = {"rank": 0, "world_size": 1, "store": dist.HashStore(), "timeout": timedelta(seconds=300)}
    backend = "unisono"
    if first == "replaces_gloo":
        os.environ["UNISONO_REPLACE"] = "gloo"
        backend = "gloo"
        ut._register()
    if hasattr(dist, "_reconfigure"):
        options["enable_reconfigure"] = True
    dist.init_process_group(backend, **options)
    assert ut.supports_reconfigure()
    if rank < 3:
        ut.reconfigure(1, handles(folder, [0, 1, 2], rank)).wait()
        found = step(rank)
        assert abs(found - 1) < 1e-6, found
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
            raise AssertionError("a sum with a dead rank")
        except PeerLost as error:
            assert error.rank == 0, error
    ut.reconfigure(2, handles(folder, [1, 2, 3], rank), timeout=timedelta(seconds=300)).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (rank - 1, 3)
    found = step(rank)
    assert abs(found - 2) < 1e-6, found
    x = torch.ones(1)
    group = dist.new_group([0, 2])  # over the new world's ranks and store
    if dist.get_rank() != 1:
        dist.all_reduce(x, group=group)
        assert x.item() == 2
    dist.destroy_process_group()
    print("fine")
