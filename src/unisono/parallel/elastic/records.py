"""The newest steps of a run, each as it was begun: enough to make them again from an earlier state.

state      a copy, or a checkpoint                           the newest
step           s          s+1     s+2     ...      N-1         N
recorded                   x       x       x        x          x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import ElasticBatches

__all__ = ["StepRecord", "StepRecords"]


@dataclass(frozen=True)
class StepRecord:
    """What a step began with, beside the state.

    Attributes:
        batches, drawn: the loader of its batch, and the batch as `ElasticBatches.drawn` has it.
        settings: of the optimizers' groups.
        modes: whether each module of the model was in training mode.
    """

    batches: ElasticBatches
    drawn: Any
    settings: list[dict[str, Any]]
    modes: bytes


class StepRecords:
    """The records of successive steps."""

    def __init__(self) -> None:
        self._steps: dict[int, StepRecord] = {}

    def add(self, step: int, record: StepRecord) -> None:
        """Record a step that begins; one that is begun anew takes the place of its first attempt."""
        self._steps[step] = record

    def forget(self, copied: int, saved: int | None) -> None:
        """Forget what is not needed any more.

        Args:
            copied: the steps of the oldest copy. Batches with their data are kept after it only.
            saved: those of the newest checkpoint; None: there is none.
        """
        oldest = copied if saved is None else min(copied, saved)
        for step in [*self._steps]:
            if step <= oldest or (step <= copied and not self._steps[step].batches.is_drawn):
                del self._steps[step]

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()

    def reach_back(self, steps: int) -> int:
        """The earliest state from which this rank can make all steps again. steps: that of the newest one."""
        first = max([steps, *self._steps])
        while first in self._steps:
            first -= 1
        return first

    def between(self, state: int, newest: int) -> list[StepRecord]:
        """The records of the steps after one state, up to another."""
        return [self._steps[step] for step in range(state + 1, newest + 1)]
