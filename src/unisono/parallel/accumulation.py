"""What several calls of `step` add up before one update, weighed as one large batch.

Each call weighs its losses so that its own mean is right. The first call of an update sets the unit: the rows
or labels by which its losses are divided. Later calls divide by the same number. What is added up is then too
large by (all rows or labels) / unit, and the update divides it by that.

Example: 8 rows, then 4 rows: unit 8; the losses of the second call are divided by 8; the sum times 8 / 12 is
the mean over all 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .loss_weights import check_even

if TYPE_CHECKING:
    from .loss_weights import CutBatch

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """The calls of `step` since the last update.

    Args:
        sums: losses are sums, which add up as they are.
    Attributes:
        calls: how many have added their gradients.
    """

    def __init__(self, *, sums: bool = False) -> None:
        self.calls, self._sums = 0, sums
        self._unit = self._total = 0.0
        self._kept = (1.0, 1.0)  # the least and the largest share of labels that count, over all parts

    def weights(self, cut: CutBatch) -> list[float]:
        """The weight of each micro-batch of the next call, in units of the first call.

        Raises:
            ValueError: without `weigh`, this batch ignores another share of its labels than those before.
        """
        if self._sums:
            return cut.weights
        if self.calls == 0:
            self._unit, self._total, self._kept = cut.total, 0.0, cut.kept
            return cut.weights
        check_even(min(self._kept[0], cut.kept[0]), max(self._kept[1], cut.kept[1]))
        return [weight * cut.total / self._unit for weight in cut.weights]

    def ratio(self, count: float) -> float:
        """What the loss of the present call is multiplied by. `count`: its rows or labels, of all ranks."""
        if count == 0:
            raise ValueError("no label of this batch counts: the loss returned (sum, 0) for all of it")
        return 1.0 if self._sums else self._unit / count

    def add(self, count: float) -> float:
        """Count the present call; return what all gradients so far are multiplied by."""
        self.calls += 1
        self._total += count
        return 1.0 if self._sums else self._unit / self._total

    def clear(self) -> None:
        """Begin anew."""
        self.calls = 0
