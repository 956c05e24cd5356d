"""Seconds of traced operators on one rank; what a model repeats is looked up once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .operator_kinds import OperatorPoint
from .traced_step import TracedOperator

if TYPE_CHECKING:
    from unisono.planner.operator_costs import OperatorCosts

__all__ = ["BY_BYTES", "OperatorPrices"]

BY_BYTES = ("light", "strided", "sums")
"""Classes whose size is bytes, which depend on the type."""


class OperatorPrices:
    """Prices of one rank.

    Args:
        costs: of a rank with as many threads as these were measured with.
        factor: of this rank's seconds beside those.
    """

    def __init__(self, costs: OperatorCosts, factor: float = 1.0) -> None:
        self._costs, self._factor = costs, factor
        self._known: dict[tuple[OperatorPoint, str, bool, float], float] = {}

    def seconds(self, operator: TracedOperator, share: float = 1.0) -> float:
        """One operator; `share`: of its elements, where another rank has the rest."""
        key = operator.size, operator.phase, operator.followed, share
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._priced(operator, share)
        return found

    def light(self, nbytes: float) -> float:
        """An operator that moves so many bytes."""
        return self._costs.at("light", max(1.0, nbytes)) * self._factor

    def _priced(self, operator: TracedOperator, share: float) -> float:
        costs = self._costs
        kind, point = operator.size
        if not kind:
            return costs.view_s
        one_size = len(point) == 1
        found = costs.at(kind, point[0] * share) if one_size else costs.at(kind, *point) * share
        found *= costs.scale.get(operator.phase, 1.0) * self._factor
        if operator.followed:
            found += costs.forward_s if operator.phase == "forward" else costs.backward_s
        return found
