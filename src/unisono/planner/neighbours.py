"""Why not otherwise: the plans one step away from a chosen one, each with what refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from unisono.planner.compute_types import PlanModel
from unisono.planner.search import PricedPlan, divisors, price
from unisono.planner.training_plan import (
    MOST_TAIL,
    RECOMPUTE,
    SCHEDULES,
    SWAPS,
    Runtime,
    TrainingPlan,
)

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


def refused_neighbours(
    model: PlanModel, chosen: PricedPlan, runtime: Runtime | None = None
) -> list[RefusedNeighbour]:
    """All plans one step away, those that memory refuses first, then the nearest."""
    found = [_refused(model, chosen, plan, runtime) for plan in _neighbours(model, chosen.plan)]
    return sorted(found, key=lambda each: (bool(each.problem), not each.excess_bytes, each.excess_s))


def _refused(
    model: PlanModel, chosen: PricedPlan, plan: TrainingPlan, runtime: Runtime | None
) -> RefusedNeighbour:
    change = plan.changes(chosen.plan)
    if problem := plan.problem(model.job, runtime):
        return RefusedNeighbour(change, problem, 0, 0.0, ("", 0.0))
    priced = price(model, plan)
    grown = [
        (now - before, name)
        for name, now, before in zip(priced.time._fields, priced.time, chosen.time, strict=True)
    ]
    seconds, name = max(grown)
    excess = model.memory.excess_bytes(plan, priced.memory)
    return RefusedNeighbour(change, "", excess, priced.time.total - chosen.time.total, (name, seconds))


def _neighbours(model: PlanModel, plan: TrainingPlan) -> Iterator[TrainingPlan]:
    job = model.job

    def changed(**fields: Any) -> TrainingPlan:
        return msgspec.structs.replace(plan, **fields)

    for axis in ("tensor", "context", "pipeline"):
        size = getattr(plan, axis)
        if plan.data > 1:
            by = divisors(plan.data)[1]
            yield _valid(changed(**{axis: size * by, "data": plan.data // by}))
        if size > 1:
            by = divisors(size)[1]
            yield _valid(changed(**{axis: size // by, "data": plan.data * by}))
    for zero in (plan.zero - 1, plan.zero + 1):
        if 0 <= zero <= 3 and plan.copies > 1:
            yield _valid(changed(zero=zero))
    if job.shape.experts is not None:
        yield from (changed(expert=each) for each in _beside(divisors(plan.data), plan.expert))
    if plan.zero:
        shards = divisors(plan.data)[1:]
        beside = _beside(shards, plan.shard or plan.data)
        yield from (changed(shard=0 if each == plan.data else each) for each in beside)
    for recompute in RECOMPUTE:
        if recompute != plan.recompute and not (recompute == "selective" and job.shape.attention == "fused"):
            yield changed(recompute=recompute)
    if plan.tensor > 1:
        yield changed(sequence=not plan.sequence)
    rest = divisors(job.batch // plan.data)
    yield from (changed(micro_batch=each, rows=()) for each in _beside(rest, plan.micro_batch))
    if plan.pipeline > 1:
        chunks = divisors(-(-job.shape.layers // plan.pipeline))
        yield from (changed(interleave=each, layers=()) for each in _beside(chunks, plan.interleave))
        if job.cluster is None:
            yield from (changed(tail=each) for each in _beside(list(range(MOST_TAIL + 1)), plan.tail))
            yield from (changed(schedule=each) for each in SCHEDULES if each != plan.schedule)
    if job.hardware.host is not None:
        yield from (changed(swap=each) for each in SWAPS if each != plan.swap)
    yield from (changed(codec=each) for each in ("none", *job.codecs) if each != plan.codec)
    yield from (changed(compute=each) for each in job.computes if each != plan.compute)
    if job.cluster is not None:
        yield from (changed(**{name: ()}) for name in ("layers", "rows") if getattr(plan, name))
        orders = job.cluster.orders if plan.pipeline > 1 else []
        yield from (changed(order=each, layers=()) for each in orders if each != (plan.order or orders[0]))


def _valid(plan: TrainingPlan) -> TrainingPlan:
    """Without what its axes do not have."""
    return msgspec.structs.replace(
        plan,
        sequence=plan.sequence and plan.tensor > 1,
        zero=plan.zero if plan.copies > 1 else 0,
        shard=plan.shard if plan.zero and 1 < plan.shard < plan.data and plan.data % plan.shard == 0 else 0,
        interleave=plan.interleave if plan.pipeline > 1 else 1,
        tail=plan.tail if plan.pipeline > 1 else 0,
        schedule=plan.schedule if plan.pipeline > 1 else "1f1b",
        layers=(),
        rows=(),
    )


def _beside(values: list[int], value: int) -> list[int]:
    """The next smaller and the next larger one."""
    return [*[each for each in values if each < value][-1:], *[each for each in values if each > value][:1]]
