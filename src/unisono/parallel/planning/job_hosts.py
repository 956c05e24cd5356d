"""The hosts of a job that is planned, where they differ: their ranks, memory and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.engine.environment.env import parse_size

__all__ = ["MOST_RANKS", "JobHost", "bytes_of", "hosts_of"]

MOST_RANKS = 4096
"""Of a job: prices of collectives of more take long."""


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
        memory: bytes of each of them, or a text such as "16G"; None: as `plan(memory=...)` says.
        speed: the rate at which each of them computes, beside a rank of this job: 0.5 takes twice as long.
    Raises:
        TypeError, ValueError: wrong arguments.
    Example: up.plan(..., hosts=[up.JobHost(ranks=4), up.JobHost(ranks=4, memory="8G", speed=0.5)])
    """

    ranks: int
    memory: int | str | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if type(self.ranks) is not int:
            raise TypeError(f"JobHost: ranks is {self.ranks!r}, expected int")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"JobHost: ranks is {self.ranks}, expected 1 to {MOST_RANKS}")
        speed: object = self.speed
        if isinstance(speed, bool) or not isinstance(speed, (int, float)):
            raise TypeError(f"JobHost: speed is {speed!r}, expected float")
        if not 0 < speed < math.inf:
            raise ValueError(f"JobHost: speed is {speed}; it must be above 0, and finite")
        bytes_of(self.memory)


def hosts_of(given: object, ranks: int | None) -> int | list[JobHost] | None:
    """The hosts of `plan(hosts=...)`, checked: how many equal ones, or each of them; None: as in this job.

    Args:
        given: a number, or a list whose entries are ranks of a host or a JobHost.
        ranks: of all hosts, if they are given; the list has to have as many.
    Raises:
        TypeError, ValueError: wrong arguments.
    """
    if given is None or (type(given) is int and given >= 1):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(
            f"plan: hosts is {given!r}, expected a number of at least 1, or a list: ranks, or a JobHost, each"
        )
    found = [each if isinstance(each, JobHost) else JobHost(ranks=each) for each in given]
    have = sum(each.ranks for each in found)
    if not found or have > MOST_RANKS:
        raise ValueError(f"plan: hosts have {have} ranks, expected 1 to {MOST_RANKS}")
    if ranks not in (None, have):
        raise ValueError(f"plan: hosts have {have} ranks, and ranks is {ranks}")
    return found
