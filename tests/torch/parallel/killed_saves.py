"""A save that is killed at one of its steps. `main(rank, size, folder, shared, culprit, event, step)`.

A step is a call that changes the folder: making, opening for writing, renaming, deleting. First the run loads
what an attempt before has left.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.group_of_a_job import process_group

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def main(rank: int, size: int, folder: Path, shared: str, culprit: str, event: str, step: str) -> None:
    with process_group(rank, size, folder, limit_s=60):
        run = up.parallelize(
            models.make("mlp"),
            up.Plan(data=size, zero=2),
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
            loss=functional.cross_entropy,
        )
        left = loaded(run, Path(shared))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(shared, ignore_errors=True)
            (folder / "left").write_text(left)
        (batch,) = run.shard(models.vector_batches(1, 8))
        run.steps = 0
        run.step(batch)
        run.save(shared)
        note(run, Path(shared), "before")
        run.step(batch)
        run.steps = int(step)  # 1: in the place of what was saved before
        note(run, Path(shared), "after")
        dist.barrier()
        if rank == int(culprit):
            die_at(int(event), shared)
        run.save(shared, keep=1)


def loaded(run: up.Run, shared: Path) -> str:
    """Load what is there: what was saved before the kill, or what was being saved."""
    if not shared.exists():
        return "nothing"
    run.load(shared)
    state = run.state_dict()
    for name in ("before", "after") if dist.get_rank() == 0 else ():
        whole = torch.load(shared.parent / name)
        if all(torch.equal(value, whole[key]) for key, value in state.items()):
            return name
    return "neither"


def note(run: up.Run, shared: Path, name: str) -> None:
    state = run.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, shared.parent / name)


def die_at(event: int, shared: str) -> None:
    """Kill this process where it begins the change of that number, and print which one that is."""
    left = [event]

    def hook(name: str, args: tuple[Any, ...]) -> None:
        writes = name != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)
        inside = str(args[0]).startswith(shared) or not os.path.isabs(str(args[0])) if args else False
        if name not in CHANGES or not writes or not inside:
            return
        if left[0] == 0:
            print(
                f"killed at {name.removeprefix('os.')} {str(args[0]).removeprefix(shared + '/')}", flush=True
            )
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    sys.addaudithook(hook)
