"""Seconds of traced operators on one rank, and of the host that starts those of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .operator_kinds import OperatorPoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unisono.planner.operator_costs import OperatorCosts

    from .trace import TracedOperator

__all__ = ["HostStarts", "OperatorPrices"]


class HostStarts:
    """What the host of a GPU does in a step, counted in starts: the time in which it starts a small operator.

    Source: eight models too small for the device to count, under six plans of one rank each, on the host of
    an H100, in a process that had run no profiler: benchmarks/results/2026-11-26-hardware-files-again.md.
    Where the model's Python does more, they are too few.
    """

    OPERATORS: ClassVar[dict[str, float]] = {
        "convolution": 1.5, "convolution_backward": 2.4, "batch_norm": 1.6, "batch_norm_backward": 1.6,
        "norm": 1.5, "norm_backward": 3.0, "attention": 2.0, "attention_backward": 2.0, "pool": 1.5,
    }  # fmt: skip
    """Of a class: libraries choose among kernels, and an operator may have several."""

    IN_STEP = 1.5
    """Of an operator within a step, whose code is not in the host's caches, with the Python of its module."""

    STEP, BEFORE, MICRO_BATCH = 200, 150, 160
    """Of a step after its last backward; and of a micro-batch before its first operator, and with its
    backward: threads that meet, the loss, its copy."""

    AGAIN, SAVED = 120, 5.5
    """Of a unit that is computed again, and of each of its operators whose inputs recomputation drops."""

    UNIT_CALLED, MOVED, PARAMETER_MOVED = 60, 45, 4
    """Of a unit of FSDP2 in a micro-batch; to gather or reduce it once; of each of its parameters there."""

    ADDED, LOW_ADDED = 1, 5
    """Of a parameter's gradient that is added to that of another micro-batch: in f32, and from 16 bits."""

    @classmethod
    def of_operator(cls, kind: str) -> float:
        """Starts of one operator within a step. Example: "light" -> 1.5, "batch_norm" -> 2.4."""
        return cls.IN_STEP * cls.OPERATORS.get(kind, 1.0)


LEAST_SHARE = 0.25
"""Of a price that a trial of the model leaves."""


class OperatorPrices:
    """Prices of one rank.

    Args:
        costs: of a rank with as many threads as these were measured with.
        factor: of this rank's seconds beside those.
        more: seconds of each operator beside them, by phase.
    """

    def __init__(
        self, costs: OperatorCosts, factor: float = 1.0, more: Mapping[str, float] | None = None
    ) -> None:
        self._costs, self._factor, self._more = costs, factor, more or {}
        self._known: dict[tuple[OperatorPoint, str, bool, float], float] = {}

    @property
    def queued(self) -> bool:
        """Whether the host only starts operators, which a device runs in their order."""
        return self._costs.launch_s is not None

    def host(self, operator: TracedOperator) -> float:
        """Seconds of the host for an operator that a device runs."""
        costs = self._costs
        if costs.launch_s is None:
            return 0.0
        if not operator.size.kind:
            return HostStarts.of_operator("") * costs.view_s
        return HostStarts.of_operator(operator.size.kind) * (costs.launch_s + self._followed(operator))

    def launch(self, operators: float) -> float:
        """Seconds of the host for so many operators that autograd does not follow; 0 where it computes."""
        return (self._costs.launch_s or 0.0) * operators

    def seconds(self, operator: TracedOperator, share: float = 1.0) -> float:
        """One operator; `share`: of its elements, where another rank has the rest."""
        key = operator.size, operator.phase, operator.followed, share
        found = self._known.get(key)
        if found is None:
            alone = self._priced(operator, share)
            more = self._more.get(operator.phase, 0.0)
            found = self._known[key] = max(alone + more, LEAST_SHARE * alone)
        return found

    def light(self, nbytes: float) -> float:
        """An operator that moves so many bytes."""
        return self._costs.at("light", max(1.0, nbytes)) * self._factor

    def _priced(self, operator: TracedOperator, share: float) -> float:
        costs = self._costs
        kind, point, low = operator.size
        if not kind:
            return 0.0 if self.queued else costs.view_s
        cut = 0 if len(point) == 1 or kind == "product" else 1  # elements, bytes, rows, or FLOPs
        sizes = (size * share if axis == cut else size for axis, size in enumerate(point))
        found = costs.at(kind, *sizes, low=low)
        found *= costs.scale.get(operator.phase, 1.0) * self._factor
        return found if self.queued else found + self._followed(operator)

    def _followed(self, operator: TracedOperator) -> float:
        """What autograd adds."""
        if not operator.followed:
            return 0.0
        return self._costs.forward_s if operator.phase == "forward" else self._costs.backward_s
