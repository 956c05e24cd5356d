"""The hosts of a job that is planned, where they differ: their ranks, memory, speed and hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.engine.environment.env import parse_size
from unisono.planner.cluster import Cluster, find_cluster
from unisono.planner.hardware import Hardware, find_hardware

__all__ = ["MOST_RANKS", "JobHost", "bytes_of", "hosts_of"]

MOST_RANKS = 4096
"""Of a job: prices of collectives of more take long."""

MOST_SPEED = 1e6


def bytes_of(memory: object, name: str = "memory") -> int | None:
    """Bytes, from a number or a text such as "16G".

    Raises:
        ValueError: they are none.
    """
    if isinstance(memory, str):
        try:
            memory = parse_size(memory)
        except ValueError as error:
            raise ValueError(f"plan: {name} is {memory!r}, expected {error}") from None
    if memory is not None and (type(memory) is not int or not 1 <= memory < 1 << 62):
        raise ValueError(f'plan: {name} is {memory!r}, expected bytes of a rank, such as 16 << 30 or "16G"')
    return memory


@dataclass(frozen=True, kw_only=True)
class JobHost:
    """One host of a job.

    Args:
        ranks: on it.
        memory: bytes of each of them, or a text such as "16G"; None: as `plan(memory=...)` says, or what the
            hardware leaves for plans.
        speed: the rate at which each of them computes, beside a rank of this job or a GPU of the hardware:
            0.5 takes twice as long.
        hardware: GPUs of the host, which this machine need not have: a name such as "a100-80g", a file, or a
            `Hardware`. None: ranks compute as those of this job.
    Raises:
        TypeError, ValueError: wrong arguments.    OSError: the file cannot be read.
    Example: up.plan(..., hosts=[up.JobHost(ranks=4), up.JobHost(ranks=4, memory="8G", speed=0.5)])
    """

    ranks: int
    memory: int | str | None = None
    speed: float = 1.0
    hardware: Hardware | str | Path | None = None

    def __post_init__(self) -> None:
        if type(self.ranks) is not int:
            raise TypeError(f"JobHost: ranks is {self.ranks!r}, expected int")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"JobHost: ranks is {self.ranks}, expected 1 to {MOST_RANKS}")
        speed: object = self.speed
        if isinstance(speed, bool) or not isinstance(speed, (int, float)):
            raise TypeError(f"JobHost: speed is {speed!r}, expected float")
        if not 1 / MOST_SPEED <= speed <= MOST_SPEED:
            raise ValueError(f"JobHost: speed is {speed}, expected {1 / MOST_SPEED:g} to {MOST_SPEED:g}")
        memory, gpu = bytes_of(self.memory), self.gpu
        if gpu is None:
            return
        if self.ranks > gpu.ranks:
            raise ValueError(f"JobHost: ranks is {self.ranks}, and a host of {gpu.name} has {gpu.ranks} GPUs")
        if memory is not None:
            gpu.check_limit(memory, "JobHost: ")

    @property
    def gpu(self) -> Hardware | None:
        """Its hardware, read; None: as in this job."""
        given: object = self.hardware
        if given is None or isinstance(given, Hardware):
            return given
        if not isinstance(given, (str, Path)):
            kind = type(given).__name__
            raise TypeError(f"JobHost: hardware is a {kind}, expected a name, a file or a Hardware")
        return find_hardware(given)


def hosts_of(given: object, ranks: int | None) -> int | list[JobHost] | None:
    """The hosts of `plan(hosts=...)`, checked: how many equal ones, or each of them; None: as in this job.

    Args:
        given: a number; a list whose entries are ranks of a host or a JobHost; or hardware as
            `unisono plan --hosts` takes it: "4xa100-80g", a file, or pairs of a number and hardware.
        ranks: of all hosts, if they are given. A list has to have as many; equal hosts of hardware may have
            more, of which they are evenly taken.
    Raises:
        TypeError, ValueError: wrong arguments.    OSError: a file cannot be read.
    """
    if given is None or (type(given) is int and given >= 1):
        return given
    if isinstance(given, (str, Path)) or _pairs(given):
        return _of_cluster(find_cluster(given), ranks)  # type: ignore[arg-type]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(
            f"plan: hosts is {given!r}, expected a number of at least 1, a list: ranks, or a JobHost, each, "
            'or hardware such as "4xa100-80g"'
        )
    found = [each if isinstance(each, JobHost) else JobHost(ranks=each) for each in given]
    have = sum(each.ranks for each in found)
    if not found or have > MOST_RANKS:
        raise ValueError(f"plan: hosts have {have} ranks, expected 1 to {MOST_RANKS}")
    if ranks not in (None, have):
        raise ValueError(f"plan: hosts have {have} ranks, and ranks is {ranks}")
    if len({each.hardware is None for each in found}) > 1:
        raise ValueError(
            "plan: some hosts have hardware, and others are as this one; write it for all or for none"
        )
    return found


def _pairs(given: object) -> bool:
    """Whether these are pairs of a number and hardware."""
    return isinstance(given, (list, tuple)) and bool(given) and isinstance(given[0], (list, tuple))


def _of_cluster(cluster: Cluster, ranks: int | None) -> list[JobHost]:
    """Each host of a cluster; equal ones have as many of `ranks`."""
    if cluster.ranks > MOST_RANKS:
        raise ValueError(f"plan: hosts have {cluster.ranks} ranks, expected 1 to {MOST_RANKS}")
    kinds = [(kind.hosts, kind.hardware.ranks, kind.hardware) for kind in cluster.kinds]
    if ranks not in (None, cluster.ranks):
        (count, most, gpu), *others = kinds
        if others or ranks % count or ranks // count > most:
            raise ValueError(
                f"plan: hosts have {cluster.ranks} ranks, and ranks is {ranks}. Fewer have to be evenly on "
                "equal hosts"
            )
        kinds = [(count, ranks // count, gpu)]
    return [each for count, here, gpu in kinds for each in [JobHost(ranks=here, hardware=gpu)] * count]
