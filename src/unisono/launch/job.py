"""What is to be started: one frozen record, and the environment each rank gets from it.

Nothing here starts a process or reads the environment of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono import env
from unisono.authentication import Token
from unisono.limits import usable_cores
from unisono.virtual.environment import set_for_children

__all__ = ["STDERR", "STDOUT", "Assignment", "Job", "VirtualGpus", "rank_environment"]

STDOUT = 1
STDERR = 2


class VirtualGpus(NamedTuple):
    """What `unisono.virtual` is asked for in every rank. `memory`: bytes of each, 0: no limit."""

    gpus: int
    memory: int
    poison: bool
    check_streams: bool


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
        json_errors: the file that gets the record of how the job ended; "": none.
        full_tracebacks: Unisono's own frames are shown, too.
        gpus: the virtual GPUs of this machine.
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
    json_errors: str = ""
    full_tracebacks: bool = False
    replace: str = ""
    nnodes: int = 1
    node_rank: int = 0
    token: Token = field(default_factory=Token, repr=False)
    advertise: str = ""
    tls: bool = False
    gpus: VirtualGpus | None = None


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
    job: Job,
    local_rank: int,
    base: Mapping[str, str],
    *,
    assignment: Assignment,
    status_fd: int,
    report_fd: str = "",
    shared: str = "",
) -> dict[str, str]:
    """Build the environment of one rank.

    Placement that another launcher left in `base` (SLURM_PROCID, ...) describes this launcher, not
    the rank, and is dropped: a library that reads it would see n equal ranks.
    """
    ours = ("UNISONO_TOKEN", "UNISONO_TOKEN_FILE") if job.token else ()
    dropped = _foreign_placement().union(ours)
    environ = {name: value for name, value in base.items() if name not in dropped}
    _share_cores(environ, job.world_size)
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
        UNISONO_REPORT_FD=report_fd,
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
    if job.gpus:
        gpus, memory, poison, check_streams = job.gpus
        set_for_children(environ, gpus, str(memory), poison=poison, check_streams=check_streams)
        environ["UNISONO_VIRTUAL_SHARED"] = shared
    return environ


def _share_cores(environ: dict[str, str], ranks: int) -> None:
    """Give every rank its part of the cores; where the user gives them more threads, let idle ones sleep.

    OpenMP's threads wait for their next work by polling. With more of them than cores, they take the time
    of the ranks that have work.
    """
    cores = usable_cores()
    threads = environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks))).partition(",")[0].strip()
    many = threads.isdecimal() and int(threads) > 1 and int(threads) * ranks > cores
    if many and not environ.keys() & env.WAIT_POLICIES:
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
