"""The collectives and messages of a step on one rank: calls, bytes and seconds of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .step_parts import StepParts
from .step_time import step_forecast

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec

    from .hardware_prices import Collectives

__all__ = ["PricedCollective", "collective_calls"]

EXCHANGED = {"context": "context", "experts": "expert"}
"""Cause of an exchange -> its axis."""


class PricedCollective(NamedTuple):
    """All calls of one kind in a step, on the mean rank of a pipeline.

    Attributes:
        collective: such as all_reduce.    ranks: of a call.
        axis: tensor, data, pipeline, context or expert.
        nbytes: of all calls, each of the whole buffer.    calls: may be a part of one, under local_steps.
        seconds: of all calls, whether compute hides them or not.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: float
    calls: float
    seconds: float

    def _times(self, share: float) -> PricedCollective:
        """So often."""
        return self._replace(
            nbytes=self.nbytes * share, calls=self.calls * share, seconds=self.seconds * share
        )


class _LoggedCosts:
    """Prices, and what was priced: (collective, ranks, bytes, seconds)."""

    def __init__(self, costs: Collectives) -> None:
        self._costs = costs
        self.found: list[tuple[str, tuple[int, ...], float, float]] = []

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        return self._note(collective, members, nbytes, self._costs.seconds(collective, members, nbytes))

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        taken = self._costs.coded(members, nbytes, codec)
        return self._note(f"all_reduce in {codec.label}", members, nbytes, taken)

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        taken = self._costs.message(sender, receiver, nbytes, beside)
        return self._note("message", (sender, receiver), nbytes, taken)

    def _note(self, collective: str, members: Sequence[int], nbytes: float, taken: float) -> float:
        if len(members) > 1:
            self.found.append((collective, tuple(members), nbytes, taken))
        return taken


def collective_calls(parts: StepParts) -> list[PricedCollective]:
    """Those of a step, what takes longest first."""
    plan, costs = parts.plan, _LoggedCosts(parts.reductions)
    parts.reductions = costs  # type: ignore[assignment]
    step_forecast(parts)
    tensor = tuple(range(plan.tensor))
    meetings = plan.local_steps or 1
    found: dict[tuple[str, str, int], PricedCollective] = {}
    rows = [
        (name, "pipeline" if name == "message" else "data", members, nbytes, taken, 1 / meetings)
        for name, members, nbytes, taken in costs.found
    ]
    rows += [(name, "tensor", tensor, *rest) for name, *rest in _tensor_moves(parts)]  # type: ignore[misc]
    calls = [
        PricedCollective(name, axis, len(members), nbytes, 1.0, taken)._times(
            (1 if axis == "pipeline" else times) / plan.pipeline
        )
        for name, axis, members, nbytes, taken, times in rows
    ]
    for each in (*calls, *_exchanges(parts)):
        before = found.setdefault(each[:3], each._times(0.0))
        found[each[:3]] = PricedCollective(
            *each[:3], *(one + other for one, other in zip(before[3:], each[3:], strict=True))
        )
    return sorted(found.values(), key=lambda each: -each.seconds)


def _exchanges(parts: StepParts) -> Iterator[PricedCollective]:
    """What the axes of context and experts exchange in a step."""
    plan = parts.plan
    for exchange in parts.exchanges:
        axis = EXCHANGED[exchange.cause]
        again = 1 + (plan.recompute is True)
        for calls, times in ((exchange.forward, again), (exchange.backward, 1)):
            for each in calls:
                made = PricedCollective(
                    each.collective, axis, each.ranks, each.nbytes, each.calls, each.seconds
                )
                yield made._times(times * plan.micro_batches / plan.pipeline)


def _tensor_moves(parts: StepParts) -> Iterator[tuple[str, float, float, float]]:
    """(collective, bytes, seconds, how often in a step) of the tensor axis."""
    plan, members = parts.plan, parts.groups.slowest(parts.plan.tensor, 1)
    for move in parts.traced.moves if plan.tensor > 1 else ():
        if move.phase == "regather" and not (plan.sequence and not plan.recompute):
            continue
        again = bool(plan.recompute) and move.phase == "forward" and bool(move.unit)
        nbytes = move.nbytes / plan.context
        taken = parts.collectives.seconds(move.collective, members, nbytes)
        yield move.collective, nbytes, taken, plan.micro_batches * (1.0 + again)
