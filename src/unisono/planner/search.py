"""The search: all plans of a space, the fastest that fit, exactly; and why not the plans beside one.

Plans are a tree: axes and micro-batches, then stages and recomputation, then what is shared, swapped and
coded. Each inner node has a bound of its time, which is cheap, and one of its memory. The tree is visited in
the order of the bounds of time, until none can beat the plans that were found.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from unisono.planner.cluster_model import PlanModels
from unisono.planner.memory import MemoryUse
from unisono.planner.plan_tree import PlanTree, beside, divisors
from unisono.planner.step_time import StepTime
from unisono.planner.training_plan import MOST_TAIL, RECOMPUTE, SCHEDULES, SWAPS, Runtime, TrainingPlan

__all__ = [
    "PricedPlan", "RefusedNeighbour", "SearchResult", "best_first", "price", "refused_neighbours", "search",
]  # fmt: skip

ROUNDING = 1e-9
"""A bound and a price add the same numbers in different orders."""


class PricedPlan(NamedTuple):
    """A plan, its step and its fullest rank."""

    plan: TrainingPlan
    time: StepTime
    memory: MemoryUse

    @property
    def order(self) -> tuple[Any, ...]:
        """Faster is first; of equally fast ones the smaller, then the simpler."""
        plan = self.plan
        return self.time.total, self.memory.total, plan.zero, RECOMPUTE.index(plan.recompute), str(plan)


class SearchResult(NamedTuple):
    """The fastest plans that fit, in order; the size of the space; if none fits, the smallest plan."""

    best: list[PricedPlan]
    candidates: int
    smallest: PricedPlan | None


def price(models: PlanModels, plan: TrainingPlan) -> PricedPlan:
    """A plan with its time and memory."""
    model = models.of(plan)
    return PricedPlan(plan, model.step(plan), model.memory.of(plan))


def search(models: PlanModels, tree: PlanTree, count: int) -> SearchResult:
    """The `count` fastest plans of a space that fit."""
    limit_bytes, axes = models.job.limit_bytes, list(tree.axes())
    roots = [
        each
        for each in tree.recomputations(axes)
        if models.of(each).memory.least_of_axes_bytes(each) <= limit_bytes
    ]
    best: list[PricedPlan] = []
    for bound_s, stages in _by_bound(
        roots,
        tree.stages,
        lambda plan: models.of(plan).least_of_axes_s(plan),
        lambda plan: models.of(plan).least_s(plan),
    ):
        if len(best) == count and bound_s * (1 - ROUNDING) > best[-1].time.total:
            break
        model = models.of(stages)
        memory: Any = model.memory
        parts = memory.parts(stages)
        if memory.least_bytes(parts, stages) > limit_bytes:
            continue
        for plan in tree.sharings(stages):
            use = memory.fullest(plan, parts)
            if not memory.excess_bytes(plan, use):
                best.append(PricedPlan(plan, model.step(plan), use))
        best = sorted(best, key=lambda each: each.order)[:count]
    smallest = None if best else _smallest(models, tree, axes)
    return SearchResult(best, sum(map(tree.count, axes)), smallest)


def _smallest(models: PlanModels, tree: PlanTree, axes: list[TrainingPlan]) -> PricedPlan | None:
    """The plan that needs least memory, as if all hosts had the limit of the job."""

    def least_of_axes_bytes(plan: TrainingPlan) -> float:
        return models.of(plan).memory.least_of_axes_bytes(plan)

    def least_bytes(plan: TrainingPlan) -> float:
        memory: Any = models.of(plan).memory
        bound: float = memory.least_bytes(memory.parts(plan), plan)
        return bound

    best: tuple[float, TrainingPlan] | None = None
    roots = tree.recomputations(axes)
    for bound, stages in _by_bound(roots, tree.stages, least_of_axes_bytes, least_bytes):
        if best is not None and bound * (1 - ROUNDING) > best[0]:
            break
        memory: Any = models.of(stages).memory
        parts = memory.parts(stages)
        for plan in tree.sharings(stages):
            use = memory.fullest(plan, parts)
            total = use.total + models.job.limit_bytes - memory.limit_bytes(plan)
            if best is None or total < best[0]:
                best = total, plan
    return None if best is None else price(models, best[1])


class _PlanNode(NamedTuple):
    """Of the tree, with its bound; `at` orders equal ones. Roots have nodes below them."""

    least: float
    at: int
    root: bool
    plan: TrainingPlan


def _by_bound(
    roots: Iterable[TrainingPlan],
    below: Callable[[TrainingPlan], Iterable[TrainingPlan]],
    least_of_root: Callable[[TrainingPlan], float],
    least: Callable[[TrainingPlan], float],
) -> Iterator[tuple[float, TrainingPlan]]:
    """The nodes below some roots in the order of their bounds; roots are opened as late as can be."""
    number = itertools.count()

    def opened(node: _PlanNode) -> Iterable[_PlanNode] | None:
        if not node.root:
            return None
        bounds = ((max(least(plan), node.least), plan) for plan in below(node.plan))
        return (_PlanNode(bound, next(number), False, plan) for bound, plan in bounds)

    found = [_PlanNode(least_of_root(plan), next(number), True, plan) for plan in roots]
    return ((node.least, node.plan) for node in best_first(found, opened))


Entry = TypeVar("Entry", bound=tuple[Any, ...])


def best_first(
    entries: Iterable[Entry], opened: Callable[[Entry], Iterable[Entry] | None]
) -> Iterator[Entry]:
    """Entries in their order, the least first.

    Args:
        opened: gives what takes the place of an entry, and is no less: the nodes below one, or a price where
            a bound was. None: the entry stays as it is.
    """
    heap = list(entries)
    heapq.heapify(heap)
    while heap:
        entry = heapq.heappop(heap)
        below = opened(entry)
        if below is None:
            yield entry
            continue
        for each in below:
            heapq.heappush(heap, each)


# ---- why not otherwise -----------------------------------------------------------------------------------


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
    models: PlanModels, chosen: PricedPlan, runtime: Runtime | None = None
) -> list[RefusedNeighbour]:
    """All plans one step away, those that memory refuses first, then the nearest."""
    found = [_refused(models, chosen, plan, runtime) for plan in _neighbours(models, chosen.plan)]
    return sorted(found, key=lambda each: (bool(each.problem), not each.excess_bytes, each.excess_s))


def _refused(
    models: PlanModels, chosen: PricedPlan, plan: TrainingPlan, runtime: Runtime | None
) -> RefusedNeighbour:
    change = plan.changes(chosen.plan)
    if problem := plan.problem(models.job, runtime):
        return RefusedNeighbour(change, problem, 0, 0.0, ("", 0.0))
    priced = price(models, plan)
    grown = [
        (now - before, name)
        for name, now, before in zip(priced.time._fields, priced.time, chosen.time, strict=True)
    ]
    seconds, name = max(grown)
    excess = models.excess_bytes(plan, priced.memory)
    return RefusedNeighbour(change, "", excess, priced.time.total - chosen.time.total, (name, seconds))


def _neighbours(models: PlanModels, plan: TrainingPlan) -> Iterator[TrainingPlan]:
    job = models.job

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
        yield from (changed(expert=each) for each in beside(divisors(plan.data), plan.expert))
    if plan.zero:
        shards = divisors(plan.data)[1:]
        around = beside(shards, plan.shard or plan.data)
        yield from (changed(shard=0 if each == plan.data else each) for each in around)
    for recompute in RECOMPUTE:
        if recompute != plan.recompute and not (recompute == "selective" and job.shape.attention == "fused"):
            yield changed(recompute=recompute)
    if plan.tensor > 1:
        yield changed(sequence=not plan.sequence)
    rest = divisors(job.batch // plan.data)
    yield from (changed(micro_batch=each, rows=()) for each in beside(rest, plan.micro_batch))
    if plan.pipeline > 1:
        chunks = divisors(-(-job.shape.layers // plan.pipeline))
        yield from (changed(interleave=each, layers=()) for each in beside(chunks, plan.interleave))
        if job.cluster is None:
            yield from (changed(tail=each) for each in beside(list(range(MOST_TAIL + 1)), plan.tail))
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
