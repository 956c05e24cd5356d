"""The search: all plans of a space, the fastest that fit, exactly.

Plans are a tree: axes and micro-batches, then stages and recomputation, then what is shared, swapped and
coded. Each inner node has a bound of its time, which is cheap, and one of its memory. The tree is visited in
the order of the bounds of time, until none can beat the plans that were found.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from unisono.planner.memory import MemoryUse
from unisono.planner.step_time import StepTime, TimeModel
from unisono.planner.training_plan import MOST_TAIL, RECOMPUTE, SCHEDULES, SWAPS, TrainingJob, TrainingPlan

__all__ = ["PricedPlan", "SearchResult", "divisors", "plan_space", "price", "search"]

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


def divisors(number: int) -> list[int]:
    """All of them. Example: divisors(12) == [1, 2, 3, 4, 6, 12]."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def price(model: TimeModel, plan: TrainingPlan) -> PricedPlan:
    """A plan with its time and memory."""
    return PricedPlan(plan, model.step(plan), model.memory.of(plan))


def plan_space(job: TrainingJob, fixed: Mapping[str, Any]) -> Iterator[TrainingPlan]:
    """All plans of a job that have the fixed fields."""
    space = PlanTree(job, fixed)
    for axes in space.axes():
        for stages in space.stages(axes):
            yield from space.sharings(stages)


def search(model: TimeModel, fixed: Mapping[str, Any], count: int) -> SearchResult:
    """The `count` fastest plans of the space that fit."""
    tree, memory, limit_bytes = PlanTree(model.job, fixed), model.memory, model.job.limit_bytes
    roots = list(tree.axes())

    def least_s(plan: TrainingPlan, *, axes: bool) -> float:
        return model.least_of_axes_s(plan) if axes else model.least_s(plan)

    best: list[PricedPlan] = []
    for bound_s, stages in _by_bound(roots, tree.stages, least_s):
        if len(best) == count and bound_s * (1 - ROUNDING) > best[-1].time.total:
            break
        for plan in tree.sharings(stages) if memory.least_bytes(stages) <= limit_bytes else ():
            use = memory.of(plan)
            if not memory.excess_bytes(plan, use):
                best.append(PricedPlan(plan, model.step(plan), use))
        best = sorted(best, key=lambda each: each.order)[:count]
    smallest = None if best else _smallest(model, tree, roots)
    return SearchResult(best, sum(map(tree.count, roots)), smallest)


def _smallest(model: TimeModel, tree: PlanTree, roots: list[TrainingPlan]) -> PricedPlan | None:
    """The plan that needs least memory."""

    def least_bytes(plan: TrainingPlan, *, axes: bool) -> float:
        return 0.0 if axes else model.memory.least_bytes(plan)

    best: tuple[int, TrainingPlan] | None = None
    for bound, stages in _by_bound(roots, tree.stages, least_bytes):
        if best is not None and bound * (1 - ROUNDING) > best[0]:
            break
        for plan in tree.sharings(stages):
            total = model.memory.of(plan).total
            if best is None or total < best[0]:
                best = total, plan
    return None if best is None else price(model, best[1])


class _Bound(NamedTuple):
    """Of a node of the tree; `at` orders equal ones."""

    least: float
    at: int
    axes: bool
    plan: TrainingPlan


def _by_bound(
    roots: Iterable[TrainingPlan],
    below: Callable[[TrainingPlan], Iterable[TrainingPlan]],
    least: Callable[..., float],
) -> Iterator[tuple[float, TrainingPlan]]:
    """The nodes below some roots in the order of their bounds; roots are opened as late as can be."""
    heap: list[_Bound] = []

    def push(plan: TrainingPlan, *, axes: bool, floor: float) -> None:
        heapq.heappush(heap, _Bound(max(least(plan, axes=axes), floor), next(number), axes, plan))

    number = itertools.count()
    for root in roots:
        push(root, axes=True, floor=0.0)
    while heap:
        node = heapq.heappop(heap)
        if not node.axes:
            yield node.least, node.plan
            continue
        for plan in below(node.plan):
            push(plan, axes=False, floor=node.least)


class PlanTree:
    """The space of a job's plans that have some fixed fields, as a tree.

    Which stages and which sharings there are depends on few numbers: they are found once for each.
    """

    def __init__(self, job: TrainingJob, fixed: Mapping[str, Any]) -> None:
        self.job, self._fixed = job, fixed
        self._stages: dict[tuple[int, bool, bool], list[dict[str, Any]]] = {}
        self._sharings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def axes(self) -> Iterator[TrainingPlan]:
        """Axes and micro-batches of all plans."""
        job, ranks = self.job, self.job.ranks
        experts = job.shape.experts
        for tensor in self._choices("tensor", divisors(ranks)):
            for context in self._choices("context", divisors(ranks // tensor)):
                for pipeline in self._choices("pipeline", divisors(ranks // tensor // context)):
                    data = self._fixed.get("data", ranks // tensor // context // pipeline)
                    if job.batch % data or data * tensor * context * pipeline != ranks:
                        continue
                    plan = TrainingPlan(data=data, tensor=tensor, context=context, pipeline=pipeline)
                    if plan.problem(job):
                        continue
                    spread = divisors(data) if experts is not None else [1]
                    for expert in self._choices("expert", spread):
                        for micro_batch in self._choices("micro_batch", divisors(job.batch // data)):
                            for sequence in self._choices("sequence", [False, True]):
                                fields = {"expert": expert, "micro_batch": micro_batch, "sequence": sequence}
                                found = msgspec.structs.replace(plan, **fields)
                                if not found.problem(job):
                                    yield found

    def stages(self, axes: TrainingPlan) -> list[TrainingPlan]:
        """The plans of these axes with all stages and recomputations."""
        return [msgspec.structs.replace(axes, **fields) for fields in self._stage_fields(axes)]

    def sharings(self, stages: TrainingPlan) -> Iterator[TrainingPlan]:
        """The plans of these stages with all that is shared, swapped and coded."""
        for fields in self._sharing_fields(stages):
            yield msgspec.structs.replace(stages, **fields)

    def count(self, axes: TrainingPlan) -> int:
        """How many plans have these axes."""
        schedules = Counter(fields["schedule"] for fields in self._stage_fields(axes))
        return sum(
            number * len(self._sharing_fields(msgspec.structs.replace(axes, schedule=schedule)))
            for schedule, number in schedules.items()
        )

    def _choices(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        return [self._fixed[name]] if name in self._fixed else values

    def _stage_fields(self, axes: TrainingPlan) -> list[dict[str, Any]]:
        count = axes.micro_batches(self.job.batch)
        key = axes.pipeline, count % axes.pipeline == 0, count >= axes.pipeline
        if key not in self._stages:
            chunks = divisors(-(-self.job.shape.layers // axes.pipeline)) if axes.pipeline > 1 else [1]
            tails = range(MOST_TAIL + 1) if axes.pipeline > 1 else [0]
            self._stages[key] = self._allowed(
                axes, interleave=chunks, tail=tails, schedule=SCHEDULES, recompute=RECOMPUTE
            )
        return self._stages[key]

    def _sharing_fields(self, stages: TrainingPlan) -> list[dict[str, Any]]:
        key = (stages.data, stages.context, stages.expert, stages.tensor, stages.pipeline, stages.schedule)
        if key not in self._sharings:
            swaps = SWAPS if self.job.hardware.host is not None else SWAPS[:1]
            shards = [0, *divisors(stages.data)[1:-1]]
            self._sharings[key] = self._allowed(
                stages, zero=range(4), shard=shards, swap=swaps, codec=("none", *self.job.codecs)
            )
        return self._sharings[key]

    def _allowed(self, base: TrainingPlan, **choices: Iterable[Any]) -> list[dict[str, Any]]:
        """The combinations of these fields which `base` can have."""
        found: list[dict[str, Any]] = [{}]
        for name, values in choices.items():
            found = [{**fields, name: value} for fields in found for value in self._choices(name, values)]
        return [
            fields for fields in found if not msgspec.structs.replace(base, **fields).problem(self.job)
        ]
