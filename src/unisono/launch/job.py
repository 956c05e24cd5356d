"""What is to be started: one frozen record, and the environment each rank gets from it.

Nothing here starts a process or reads the environment of this one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono import env
from unisono.secure import Token

__all__ = ["STDERR", "STDOUT", "Assignment", "Job", "rank_environment", "usable_cores"]

STDOUT = 1
STDERR = 2


@dataclass(frozen=True)
class Job:
    """One run of `world_size` processes of one command on this machine, alone or as one node of several.

    Attributes:
        command: argv of every rank.
        shown: per rank the streams that reach the console, STDOUT | STDERR.
        logged: per rank the streams that are written to files in `log_dir`.
        master_port: 0 lets the launcher choose a free one; of several nodes, where they meet.
        nnodes, node_rank: how many machines, and which this is.
        token: the job's; every connection of its processes proves it.
        advertise, tls: UNISONO_ADVERTISE and UNISONO_TLS of the ranks.
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
    nnodes: int = 1
    node_rank: int = 0
    token: Token = field(default_factory=Token, repr=False)
    advertise: str = ""
    tls: bool = False


@dataclass(frozen=True)
class Assignment:
    """What is known once all nodes have met.

    Attributes:
        store: host:port of the store, as this node reaches it.
        master_port: MASTER_PORT of the ranks.
        first_rank: rank of this node's local rank 0.
        world_size: ranks of all nodes.
    """

    store: str
    master_port: int
    first_rank: int
    world_size: int


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
    job: Job, local_rank: int, base: Mapping[str, str], *, assignment: Assignment, status_fd: int
) -> dict[str, str]:
    """Build the environment of one rank.

    Placement that another launcher left in `base` (SLURM_PROCID, ...) describes this launcher, not
    the rank, and is dropped: a library that reads it would see n equal ranks.
    """
    ours = ("UNISONO_TOKEN", "UNISONO_TOKEN_FILE") if job.token else ()
    dropped = _foreign_placement().union(ours)
    environ = {name: value for name, value in base.items() if name not in dropped}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.world_size)))
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    environ.update(
        RANK=str(assignment.first_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GROUP_RANK=str(job.node_rank),
        GROUP_WORLD_SIZE=str(job.nnodes),
        MASTER_ADDR=job.master_addr,
        MASTER_PORT=str(assignment.master_port),
        UNISONO_STORE=assignment.store,
        UNISONO_STATUS_FD=str(status_fd),
        PYTHONUNBUFFERED="1",
    )
    if job.token:
        environ["UNISONO_TOKEN"] = job.token.hex()
    if job.tls:
        environ["UNISONO_TLS"] = "1"
    if job.advertise:
        environ["UNISONO_ADVERTISE"] = job.advertise
    if job.replace:
        environ["UNISONO_REPLACE"] = job.replace
    return environ
