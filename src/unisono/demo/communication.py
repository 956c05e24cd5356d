"""Measures how long a training step communicates, in the same way for every backend.

A DDP communication hook starts each bucket's all-reduce, and records its start and its end. A step
has two figures:

    exposed    time the step could not compute because of communication: the time in the hook,
               plus the time from the last bucket's start to the return of backward()
    in flight  time during which at least one all-reduce was under way, hidden behind compute or not

Both include waiting for late ranks; with more ranks than cores that is a large part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

__all__ = ["CommunicationClock", "union_s"]


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one interval.

    Example: (0, 2), (1, 3), (5, 6) -> 4.
    """
    total, covered_to = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total


class Bucket(Protocol):
    """The part of DDP's GradBucket that the hook uses."""

    def buffer(self) -> torch.Tensor:
        """The gradients of some parameters, flat."""


class CommunicationClock:
    """The state of the hook, and in `all_reduce` the hook itself."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.start_step()

    def start_step(self) -> None:
        """Clear the records of the step before."""
        self.in_hook_s = 0.0
        self.last_start = 0.0
        self.nbytes = 0
        self.intervals: list[tuple[float, float]] = []

    def all_reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Average one bucket over the ranks, as DDP does without a hook: divide, then sum."""
        begin = time.perf_counter()
        gradients: torch.Tensor = bucket.buffer().div_(self.world_size)
        work = dist.all_reduce(gradients, async_op=True)

        def done(future: Future[object]) -> torch.Tensor:
            future.value()  # raises its error
            self.intervals.append((begin, time.perf_counter()))
            return gradients

        result: Future[torch.Tensor] = work.get_future().then(done)
        self.last_start = time.perf_counter()
        self.in_hook_s += self.last_start - begin
        self.nbytes += gradients.numel() * gradients.element_size()
        return result

    def exposed_s(self, backward_returned: float) -> float:
        """Seconds of the step in which communication delayed computation; call it after backward()."""
        return self.in_hook_s + backward_returned - self.last_start

    def in_flight_s(self) -> float:
        """Seconds of the step with an all-reduce under way."""
        return union_s(self.intervals)
