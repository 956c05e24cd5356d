"""x"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .collectives import PricedCollective
from .step_parts import StepParts
from .step_time import step_forecast

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec

    from .collectives import Collectives

__all__ = ["collective_calls"]


class _LoggedCosts:
    """Prices of the data axis and of messages, and what was priced."""

    def __init__(self, costs: Collectives) -> None:
        self._costs = costs
        self.found: list[PricedCollective] = []

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        return self._note(collective, members, nbytes, self._costs.seconds(collective, members, nbytes))

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        taken = self._costs.coded(members, nbytes, codec)
        return self._note(f"all_reduce in {codec.label}", members, nbytes, taken)

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        taken = self._costs.message(sender, receiver, nbytes, beside)
        return self._note("message", (sender, receiver), nbytes, taken)

    def _note(self, collective: str, members: Sequence[int], nbytes: float, taken: float) -> float:
        axis = "pipeline" if collective == "message" else "data"
        if len(members) > 1:
            self.found.append(PricedCollective(collective, axis, len(members), nbytes, 1.0, taken))
        return taken


def collective_calls(parts: StepParts) -> list[PricedCollective]:
    """The collectives and messages of a step on one rank, what takes longest first."""
    plan, costs = parts.plan, _LoggedCosts(parts.reductions)
    parts.reductions = costs  # type: ignore[assignment]
    step_forecast(parts)
    meetings = plan.local_steps or 1
    calls = [each.times(1.0 if each.axis == "pipeline" else 1 / meetings) for each in costs.found]
    for move, priced in parts.moves():
        again = bool(plan.recompute) and move.phase == "forward" and bool(move.unit)
        calls.append(priced.times(plan.micro_batches * (1.0 + again)))
    for exchange in parts.exchanges:
        again = 1 + (plan.recompute is True)
        calls += [each.times(again * plan.micro_batches) for each in exchange.forward]
        calls += [each.times(plan.micro_batches) for each in exchange.backward]
    found: dict[tuple[str, str, int], PricedCollective] = {}
    for each in calls:
        found[each[:3]] = each.plus(found.get(each[:3], each.times(0.0)))
    return sorted((each.times(1 / plan.pipeline) for each in found.values()), key=lambda each: -each.seconds)
