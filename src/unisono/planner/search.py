"""The search: all plans of a space, the fastest that fit, exactly.

Plans that differ only in ZeRO and recomputation have a common bound, which is cheap. They are visited in the
order of their bounds, until no bound can beat the plans that were found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from unisono.planner.memory import MemoryUse, memory_of
from unisono.planner.step_time import StepTime, TimeModel
from unisono.planner.training_plan import RECOMPUTE, TrainingJob, TrainingPlan

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
    return PricedPlan(plan, model.step(plan), memory_of(plan, model.job))


def plan_space(job: TrainingJob, fixed: Mapping[str, Any]) -> Iterator[TrainingPlan]:
    """All plans of a job that have the fixed fields."""
    for base in _bases(job, fixed):
        yield from _variants(job, base, fixed)


def search(model: TimeModel, fixed: Mapping[str, Any], count: int) -> SearchResult:
    """The `count` fastest plans of the space that fit."""
    job = model.job
    bases = sorted(((model.least_s(base), at, base) for at, base in enumerate(_bases(job, fixed))))
    best: list[PricedPlan] = []
    candidates, done = 0, False
    smallest: PricedPlan | None = None
    for bound_s, _, base in bases:
        variants = list(_variants(job, base, fixed))
        candidates += len(variants)
        done = done or (len(best) == count and bound_s * (1 - ROUNDING) > best[-1].time.total)
        for plan in () if done else variants:
            memory = memory_of(plan, job)
            if memory.total <= job.limit_bytes:
                best.append(PricedPlan(plan, model.step(plan), memory))
            elif not best and (smallest is None or memory.total < smallest.memory.total):
                smallest = PricedPlan(plan, model.step(plan), memory)
        best = sorted(best, key=lambda each: each.order)[:count]
    return SearchResult(best, candidates, smallest)


def _bases(job: TrainingJob, fixed: Mapping[str, Any]) -> Iterator[TrainingPlan]:
    """Axes, interleaving and micro-batches of all plans, without ZeRO and recomputation."""

    def choices(name: str, values: list[Any]) -> list[Any]:
        return [fixed[name]] if name in fixed else values

    for tensor in choices("tensor", divisors(job.ranks)):
        if job.ranks % tensor or not job.shape.cuts(tensor):
            continue
        for pipeline in choices("pipeline", divisors(job.ranks // tensor)):
            if (job.ranks // tensor) % pipeline or pipeline > job.shape.layers:
                continue
            data = job.ranks // tensor // pipeline
            if job.batch % data or fixed.get("data", data) != data:
                continue
            for micro_batch in choices("micro_batch", divisors(job.batch // data)):
                for interleave in choices("interleave", divisors(-(-job.shape.layers // pipeline))):
                    for sequence in choices("sequence", [False, True]):
                        plan = TrainingPlan(
                            data=data,
                            tensor=tensor,
                            sequence=sequence,
                            pipeline=pipeline,
                            interleave=interleave,
                            micro_batch=micro_batch,
                        )
                        if not plan.problem(job):
                            yield plan


def _variants(job: TrainingJob, base: TrainingPlan, fixed: Mapping[str, Any]) -> Iterator[TrainingPlan]:
    """A plan under each ZeRO and recomputation."""
    for zero in [fixed["zero"]] if "zero" in fixed else range(4):
        for recompute in [fixed["recompute"]] if "recompute" in fixed else RECOMPUTE:
            plan = msgspec.structs.replace(base, zero=zero, recompute=recompute)
            if not plan.problem(job):
                yield plan
