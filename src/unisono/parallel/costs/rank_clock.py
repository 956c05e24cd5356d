"""The clock of one rank of a pipeline, and its seconds by cause.

A device runs what the host starts, in order: it is the slower of both that counts, at each place of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .forecast import CAUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.parallel.pipeline.schedule import Schedule

__all__ = ["RankClock", "mean_of"]


MOVED = ("messages", "waiting", "data")
"""Causes that depend on where the stages of a pipeline begin, and on their order."""


@dataclass
class RankClock:
    """One rank of the pipeline: its clock, and its seconds by cause."""

    clock: float = 0.0
    queued: bool = False  # the host only starts what a device runs
    host: float = 0.0  # the clock of that host
    parts: dict[str, float] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)  # that have run
    micros: dict[int, int] = field(default_factory=dict)  # stage -> gradients that it has
    beside: float = 0.0  # seconds of collectives that run beside backward
    slow: float = 1.0  # its seconds of compute beside those that are added
    fastest: float = 1.0  # the same of the rank that takes least
    least: float = 0.0  # seconds that are spent on any rank, where none is slower than the fastest one
    crowd: float = 1.0  # ranks that share a core

    @classmethod
    def of(
        cls, schedule: Schedule, slow: Sequence[float] = (), *, queued: bool = False, crowd: float = 1.0
    ) -> list[RankClock]:
        """One for each rank."""
        slow = slow or [1.0] * schedule.ranks
        return [cls(slow=each, queued=queued, fastest=min(slow), crowd=crowd) for each in slow]

    def add(
        self, cause: str, seconds: float, host: float = 0.0, *, done: float = 0.0, moves: bool = False
    ) -> None:
        """Spend time.

        Args:
            host: seconds of the host, during which a device goes on with what is queued.
            done: seconds after which a device has done it, which was idle when the host began.
            moves: they depend on where stages begin.
        """
        compute = CAUSES[cause] == "compute"
        if cause not in MOVED and not moves:
            least = seconds * self.fastest if compute else seconds
            least += 0.0 if self.queued else host
            self.least += least * self.crowd if compute else least
        seconds *= self.slow if compute else 1.0
        before, began = self.clock, self.host
        self.host += host
        if self.queued:
            self.clock = max(before + seconds, self.host, began + done)
        else:
            self.clock = before + seconds + host
        seconds = self.clock - before
        self.parts[cause] = self.parts.get(cause, 0.0) + seconds

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds so far: of compute, of all else."""
        compute = sum(taken for cause, taken in self.parts.items() if CAUSES[cause] == "compute")
        return compute, sum(self.parts.values()) - compute

    def slowed(self, factor: float) -> dict[str, float]:
        """The parts where compute takes so many times as long; collectives are priced so already."""
        return {
            cause: taken * (factor if CAUSES[cause] == "compute" else 1.0)
            for cause, taken in self.parts.items()
        }


def mean_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over ranks, by cause."""
    causes = {cause for each in parts for cause in each}
    return {cause: sum(each.get(cause, 0.0) for each in parts) / len(parts) for cause in causes}
