"""What is to be started: one frozen record, and the environment each rank gets from it.

Nothing here starts a process or reads the environment of this one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from unisono import env

__all__ = ["STDERR", "STDOUT", "Job", "rank_environment", "usable_cores"]

STDOUT = 1
STDERR = 2


@dataclass(frozen=True)
class Job:
    """One run of `world_size` processes of one command on this machine.

    Attributes:
        command: argv of every rank.
        shown: per rank the streams that reach the console, STDOUT | STDERR.
        logged: per rank the streams that are written to files in `log_dir`.
        master_port: 0 lets the launcher choose a free one.
        grace_s: seconds the others get to end by themselves after the first failure.
        replace: the PyTorch backend whose place Unisono takes in the ranks; "" leaves it to the environment.
        stdin: rank 0 inherits the launcher's standard input (everybody else reads nothing).
    """

    command: tuple[str, ...]
    world_size: int
    shown: tuple[int, ...]
    logged: tuple[int, ...]
    log_dir: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    grace_s: float = 1.0
    stdin: bool = False
    replace: str = ""


def usable_cores() -> int:
    """Cores this process may use: its affinity mask and its container's quota, not what the machine has."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as limit:
            quota, period = limit.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))


def _foreign_placement() -> frozenset[str]:
    """Names of the variables by which other launchers tell a process its place."""
    places = ("rank", "world_size", "local_rank", "local_world_size")
    return frozenset(
        variable.name
        for variable in env.VARIABLES
        if variable.source == "torchrun"
        or (variable.source in ("Open MPI", "MPICH/PMI", "Slurm") and variable.setting in places)
    )


def rank_environment(
    job: Job, rank: int, base: Mapping[str, str], *, store: str, master_port: int, status_fd: int
) -> dict[str, str]:
    """Build the environment of one rank.

    Placement that another launcher left in `base` (SLURM_PROCID, ...) describes this launcher, not
    the rank, and is dropped: a library that reads it would see n equal ranks.
    """
    environ = {name: value for name, value in base.items() if name not in _foreign_placement()}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.world_size)))
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR=job.master_addr,
        MASTER_PORT=str(master_port),
        UNISONO_STORE=store,
        UNISONO_STATUS_FD=str(status_fd),
        PYTHONUNBUFFERED="1",
    )
    if job.replace:
        environ["UNISONO_REPLACE"] = job.replace
    return environ
