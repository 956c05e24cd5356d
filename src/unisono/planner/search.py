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

from unisono.planner.compute_types import PlanModel
from unisono.planner.memory import MemoryUse
from unisono.planner.step_time import StepTime
from unisono.planner.training_plan import (
    MOST_TAIL,
    RECOMPUTE,
    SCHEDULES,
    SWAPS,
    Runtime,
    TrainingJob,
    TrainingPlan,
)

__all__ = ["PlanTree", "PricedPlan", "SearchResult", "divisors", "plan_space", "price", "search"]

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


def price(model: PlanModel, plan: TrainingPlan) -> PricedPlan:
    """A plan with its time and memory."""
    return PricedPlan(plan, model.step(plan), model.memory.of(plan))


def plan_space(space: PlanTree) -> Iterator[TrainingPlan]:
    """All plans of a space."""
    for root in space.recomputations(space.axes()):
        for stages in space.stages(root):
            yield from space.sharings(stages)


def search(model: PlanModel, tree: PlanTree, count: int) -> SearchResult:
    """The `count` fastest plans of a space that fit."""
    memory, limit_bytes = model.memory, model.job.limit_bytes
    axes = list(tree.axes())
    roots = [each for each in tree.recomputations(axes) if memory.least_of_axes_bytes(each) <= limit_bytes]
    best: list[PricedPlan] = []
    for bound_s, stages in _by_bound(roots, tree.stages, model.least_of_axes_s, model.least_s):
        if len(best) == count and bound_s * (1 - ROUNDING) > best[-1].time.total:
            break
        parts: Any = memory.parts(stages)
        if memory.least_bytes(parts, stages) > limit_bytes:
            continue
        for plan in tree.sharings(stages):
            use = memory.fullest(plan, parts)
            if not memory.excess_bytes(plan, use):
                best.append(PricedPlan(plan, model.step(plan), use))
        best = sorted(best, key=lambda each: each.order)[:count]
    smallest = None if best else _smallest(model, tree, axes)
    return SearchResult(best, sum(map(tree.count, axes)), smallest)


def _smallest(model: PlanModel, tree: PlanTree, axes: list[TrainingPlan]) -> PricedPlan | None:
    """The plan that needs least memory."""
    memory = model.memory

    def least_bytes(plan: TrainingPlan) -> float:
        parts: Any = memory.parts(plan)
        return memory.least_bytes(parts, plan)

    def used_bytes(plan: TrainingPlan, parts: Any) -> int:
        """As if all hosts had the limit of the job."""
        use = memory.fullest(plan, parts)
        return use.total + model.job.limit_bytes - memory.limit_bytes(plan)

    best: tuple[int, TrainingPlan] | None = None
    roots = tree.recomputations(axes)
    for bound, stages in _by_bound(roots, tree.stages, memory.least_of_axes_bytes, least_bytes):
        if best is not None and bound * (1 - ROUNDING) > best[0]:
            break
        parts = memory.parts(stages)
        for plan in tree.sharings(stages):
            total = used_bytes(plan, parts)
            if best is None or total < best[0]:
                best = total, plan
    return None if best is None else price(model, best[1])


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
    heap = [_PlanNode(least_of_root(plan), next(number), True, plan) for plan in roots]
    heapq.heapify(heap)
    while heap:
        node = heapq.heappop(heap)
        if not node.root:
            yield node.least, node.plan
            continue
        for plan in below(node.plan):
            heapq.heappush(heap, _PlanNode(max(least(plan), node.least), next(number), False, plan))


class PlanTree:
    """The space of a job's plans that have some fixed fields, as a tree.

    Which stages and which sharings there are depends on few numbers: they are found once for each.
    """

    def __init__(self, job: TrainingJob, fixed: Mapping[str, Any], runtime: Runtime | None = None) -> None:
        self.job, self._fixed, self._runtime = job, fixed, runtime
        self._stages: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._sharings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def axes(self) -> Iterator[TrainingPlan]:
        """Axes and micro-batches of all plans."""
        job, ranks = self.job, self.job.ranks
        experts = job.shape.experts
        for tensor in self._choices("tensor", divisors(ranks)):
            for context in self._choices("context", divisors(ranks // tensor)):
                for pipeline in self._choices("pipeline", divisors(ranks // tensor // context)):
                    data = self._fixed.get("data", ranks // tensor // context // pipeline)
                    if data * tensor * context * pipeline != ranks or job.batch % data:
                        continue
                    plan = TrainingPlan(data=data, tensor=tensor, context=context, pipeline=pipeline)
                    if self._problem(plan):
                        continue
                    spread = divisors(data) if experts is not None else [1]
                    for compute, expert in itertools.product(
                        self._choices("compute", job.computes or ("",)), self._choices("expert", spread)
                    ):
                        for micro_batch in self._choices("micro_batch", divisors(job.batch // data)):
                            for sequence in self._choices("sequence", [False, True]):
                                fields = {"expert": expert, "micro_batch": micro_batch, "sequence": sequence}
                                found = msgspec.structs.replace(plan, compute=compute, **fields)
                                if not self._problem(found):
                                    yield found

    def recomputations(self, axes: Iterable[TrainingPlan]) -> Iterator[TrainingPlan]:
        """The same, each with all recomputations."""
        for plan in axes:
            for recompute in self._choices("recompute", RECOMPUTE):
                if any(fields["recompute"] == recompute for fields in self._stage_fields(plan)):
                    yield msgspec.structs.replace(plan, recompute=recompute)

    def stages(self, root: TrainingPlan) -> list[TrainingPlan]:
        """The plans of these axes and this recomputation with all stages."""
        return [
            msgspec.structs.replace(root, **fields)
            for fields in self._stage_fields(root)
            if fields["recompute"] == root.recompute
        ]

    def sharings(self, stages: TrainingPlan) -> Iterator[TrainingPlan]:
        """The plans of these stages with all that is shared, swapped and coded."""
        for fields in self._sharing_fields(stages):
            yield msgspec.structs.replace(stages, **fields)

    def count(self, axes: TrainingPlan) -> int:
        """How many plans have these axes."""
        alike = Counter((each["schedule"], each["recompute"]) for each in self._stage_fields(axes))
        return sum(
            number * len(self._sharing_fields(msgspec.structs.replace(axes, schedule=name, recompute=again)))
            for (name, again), number in alike.items()
        )

    def _problem(self, plan: TrainingPlan) -> str:
        return plan.problem(self.job, self._runtime)

    def _choices(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        return [self._fixed[name]] if name in self._fixed else values

    def _stage_fields(self, axes: TrainingPlan) -> list[dict[str, Any]]:
        count = axes.micro_batches(self.job.batch)
        key = (axes.pipeline, count % axes.pipeline == 0, count >= axes.pipeline, self._of_runtime(axes))
        if key not in self._stages:
            chunks = divisors(-(-self.job.shape.layers // axes.pipeline)) if axes.pipeline > 1 else [1]
            tails = range(MOST_TAIL + 1) if axes.pipeline > 1 else [0]
            self._stages[key] = self._allowed(
                axes, interleave=chunks, tail=tails, schedule=SCHEDULES, recompute=RECOMPUTE
            )
        return self._stages[key]

    def _sharing_fields(self, stages: TrainingPlan) -> list[dict[str, Any]]:
        spread = (stages.expert, stages.context) if stages.expert > 1 else (1, min(stages.context, 2))
        others = stages.ranks > stages.data
        key = (stages.data, others, stages.schedule, stages.compute, *spread, self._of_runtime(stages))
        if key not in self._sharings:
            swaps = SWAPS if self.job.hardware.host is not None else SWAPS[:1]
            shards = [0, *divisors(stages.data)[1:-1]]
            self._sharings[key] = self._allowed(
                stages, zero=range(4), shard=shards, swap=swaps, codec=("none", *self.job.codecs)
            )
        return self._sharings[key]

    def _of_runtime(self, plan: TrainingPlan) -> TrainingPlan | None:
        """What a runtime may look at; the rules of `TrainingPlan.problem` look at less."""
        return None if self._runtime is None else msgspec.structs.replace(plan, micro_batch=1)

    def _allowed(self, base: TrainingPlan, **choices: Iterable[Any]) -> list[dict[str, Any]]:
        """The combinations of these fields which `base` can have."""
        found: list[dict[str, Any]] = [{}]
        for name, values in choices.items():
            found = [{**fields, name: value} for fields in found for value in self._choices(name, values)]
        return [fields for fields in found if not self._problem(msgspec.structs.replace(base, **fields))]
