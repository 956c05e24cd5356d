"""Why not otherwise: the plans one step away from a chosen one, each with what refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from unisono.planner.search import PricedPlan, divisors, price
from unisono.planner.step_time import TimeModel
from unisono.planner.training_plan import RECOMPUTE, TrainingPlan

__all__ = ["RefusedNeighbour", "refused_neighbours"]


class RefusedNeighbour(NamedTuple):
    """A plan that differs in one choice.

    Attributes:
        change: the fields that differ, such as "zero=1".
        problem: why it cannot be run; "" if it can.
        excess_bytes: memory above the limit; 0: it fits.
        excess_s: seconds more than the chosen plan's; below 0 where it is faster and does not fit.
        cause: the part of the step that grows most, and its seconds.
    """

    change: str
    problem: str
    excess_bytes: int
    excess_s: float
    cause: tuple[str, float]


def refused_neighbours(model: TimeModel, chosen: PricedPlan) -> list[RefusedNeighbour]:
    """All plans one step away, those that memory refuses first, then the nearest."""
    found = [_refused(model, chosen, plan) for plan in _neighbours(model, chosen.plan)]
    return sorted(found, key=lambda each: (bool(each.problem), not each.excess_bytes, each.excess_s))


def _refused(model: TimeModel, chosen: PricedPlan, plan: TrainingPlan) -> RefusedNeighbour:
    change = plan.changes(chosen.plan)
    if problem := plan.problem(model.job):
        return RefusedNeighbour(change, problem, 0, 0.0, ("", 0.0))
    priced = price(model, plan)
    grown = [
        (now - before, name)
        for name, now, before in zip(priced.time._fields, priced.time, chosen.time, strict=True)
    ]
    seconds, name = max(grown)
    excess = model.memory.excess_bytes(plan, priced.memory)
    return RefusedNeighbour(change, "", excess, priced.time.total - chosen.time.total, (name, seconds))


def _neighbours(model: TimeModel, plan: TrainingPlan) -> Iterator[TrainingPlan]:
    def changed(**fields: Any) -> TrainingPlan:
        return msgspec.structs.replace(plan, **fields)

    for axis in ("tensor", "pipeline"):
        size = getattr(plan, axis)
        if plan.data > 1:
            by = divisors(plan.data)[1]
            yield _valid(changed(**{axis: size * by, "data": plan.data // by}))
        if size > 1:
            by = divisors(size)[1]
            yield _valid(changed(**{axis: size // by, "data": plan.data * by}))
    for zero in (plan.zero - 1, plan.zero + 1):
        if 0 <= zero <= 3 and plan.data > 1:
            yield changed(zero=zero)
    for recompute in RECOMPUTE:
        if recompute != plan.recompute and not (
            recompute == "selective" and model.job.shape.attention == "fused"
        ):
            yield changed(recompute=recompute)
    if plan.tensor > 1:
        yield changed(sequence=not plan.sequence)
    rest = divisors(model.job.batch // plan.data)
    yield from (changed(micro_batch=each) for each in _beside(rest, plan.micro_batch))
    if plan.pipeline > 1:
        chunks = divisors(-(-model.job.shape.layers // plan.pipeline))
        yield from (changed(interleave=each) for each in _beside(chunks, plan.interleave))


def _valid(plan: TrainingPlan) -> TrainingPlan:
    """Without what its axes do not have."""
    return msgspec.structs.replace(
        plan,
        sequence=plan.sequence and plan.tensor > 1,
        zero=plan.zero if plan.data > 1 else 0,
        interleave=plan.interleave if plan.pipeline > 1 else 1,
    )


def _beside(values: list[int], value: int) -> list[int]:
    """The next smaller and the next larger one."""
    return [*[each for each in values if each < value][-1:], *[each for each in values if each > value][:1]]
