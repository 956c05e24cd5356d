"""Seconds of traced operators on one rank; what a model repeats is looked up once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .host_starts import of_operator
from .operator_kinds import OperatorPoint
from .traced_step import TracedOperator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unisono.planner.operator_costs import OperatorCosts

__all__ = ["OperatorPrices"]

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
            return of_operator("") * costs.view_s
        return of_operator(operator.size.kind) * (costs.launch_s + self._followed(operator))

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
