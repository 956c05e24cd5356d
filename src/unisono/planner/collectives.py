"""The collectives of a plan, and what they take on the links of a job."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.interconnect import RankLayout, collective_s, message_s
from unisono.planner.training_plan import TrainingJob

__all__ = ["GroupPrices", "PlannedCollective"]


class PlannedCollective(NamedTuple):
    """Equal calls of one collective in a step, on one rank.

    Attributes:
        collective: its name; "send" is a message between stages, or to the next rank of a ring.
        axis: data, replica, expert, context, tensor or pipeline.
        ranks: of its group.
        nbytes: of one call.
        calls: of a step.
        seconds: of all calls.
        exposed: seconds in which the rank waits for them.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: float
    calls: int
    seconds: float
    exposed: float

    def plus(self, other: PlannedCollective) -> PlannedCollective:
        """More of the same calls."""
        return self._replace(
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
            exposed=self.exposed + other.exposed,
        )


class GroupPrices:
    """Seconds of calls of groups of `size` ranks, `stride` apart, of one job.

    Where hosts differ, groups within blocks of `near` ranks have the links of `job`, and larger ones those of
    `wide`.
    """

    def __init__(self, job: TrainingJob, wide: TrainingJob | None = None, near: int = 0) -> None:
        self._links, self._share = job.links, job.hardware.efficiency.links
        self._wide = None if wide is None else GroupPrices(wide)
        self._ranks, self._near = job.ranks, near
        self._layouts: dict[tuple[int, int], RankLayout] = {}

    def collective_s(self, name: str, size: int, stride: int, nbytes: float) -> float:
        """An all_reduce, reduce_scatter, all_gather or all_to_all."""
        if size == 1:
            return 0.0
        if self._wide is not None and self._near % (size * stride):
            return self._wide.collective_s(name, size, stride, nbytes)
        return collective_s(name, self._layout(size, stride), nbytes, self._links, self._share)

    def ranks_of_host(self, size: int, stride: int) -> int:
        """Ranks of a group that are on one host."""
        return self._layout(size, stride).per_host

    def two_level_s(self, inside: float, outside: float) -> float:
        """Bytes that a rank sends within its host and to others, both at once."""
        links = self._links
        seconds = max(inside / links.inside.bytes_per_s, outside / links.between.bytes_per_s) / self._share
        return seconds + links.inside.latency_s + (links.between.latency_s if outside else 0.0)

    def hop_s(self, size: int, stride: int, nbytes: float) -> float:
        """A message to the next rank of the group, where some rank's next is farthest."""
        if self._wide is not None and self._near % (size * stride):
            return self._wide.hop_s(size, stride, nbytes)
        layout = self._layout(size, stride)
        return message_s(nbytes, self._links, self._share, inside=layout.per_host == size)

    def stage_s(self, ranks: int, nbytes: float) -> float:
        """A message to the next stage of a plan of so many ranks."""
        return message_s(nbytes, self._links, self._share, inside=ranks <= self._links.ranks)

    def _layout(self, size: int, stride: int) -> RankLayout:
        key = size, stride
        if key not in self._layouts:
            self._layouts[key] = RankLayout.of(size, stride, self._links.ranks, self._ranks)
        return self._layouts[key]
