"""The plans of a job, as a tree: axes and micro-batches, then stages, then what is shared, swapped and coded.

On hosts that differ they say, beside that, which host takes what. The kinds of hosts are numbered in every
order. Stages on hosts of one kind have equal layers, but for two things: on two kinds the last rank has up to
`MOST_TAIL` fewer, and what does not divide is missing on the last stages. Without a pipeline, data ranks of
one kind have equal rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from unisono.planner.cluster import MOST_KINDS
from unisono.planner.training_plan import (
    LISTS,
    MOST_TAIL,
    RECOMPUTE,
    SCHEDULES,
    SWAPS,
    Runtime,
    TrainingJob,
    TrainingPlan,
)

__all__ = ["ClusterTree", "PlanTree", "beside", "divisors", "tree_of", "uneven_layers", "uneven_rows"]


def divisors(number: int) -> list[int]:
    """All of them. Example: divisors(12) == [1, 2, 3, 4, 6, 12]."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def beside(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger one. Example: beside([1, 2, 4, 8], 4) == [2, 8]."""
    return [*[each for each in values if each < value][-1:], *[each for each in values if each > value][:1]]


def tree_of(job: TrainingJob, fixed: Any, runtime: Any = None) -> PlanTree:
    """The space of a job's plans that have some fixed fields, and that the runtime runs.

    Raises:
        ValueError: a field is fixed that only hosts that differ have.
    """
    if job.cluster is not None:
        return ClusterTree(job, fixed, runtime)
    if named := [name for name in LISTS if fixed.get(name)]:
        raise ValueError(f"{named[0]} is for hosts that differ: give hosts")
    return PlanTree(job, fixed, runtime)


class PlanTree:
    """The space of a job's plans that have some fixed fields, as a tree.

    Which stages and which sharings there are depends on few numbers: they are found once for each.
    """

    def __init__(self, job: TrainingJob, fixed: Mapping[str, Any], runtime: Runtime | None = None) -> None:
        self.job, self._fixed, self._runtime = job, fixed, runtime
        self._stages: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._sharings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def __iter__(self) -> Iterator[TrainingPlan]:
        """All plans of the space."""
        for root in self.recomputations(self.axes()):
            for stages in self.stages(root):
                yield from self.sharings(stages)

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


class ClusterTree(PlanTree):
    """The space of a job's plans on hosts that differ."""

    def __init__(self, job: TrainingJob, fixed: Any, runtime: Any = None) -> None:
        super().__init__(job, fixed, runtime)
        if job.cluster is None:
            raise ValueError("the hosts of this job do not differ")
        self._cluster = job.cluster
        self._layers: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}

    def axes(self) -> Iterator[TrainingPlan]:
        """Axes, micro-batches and orders of all plans. Without a pipeline the order makes no difference."""
        for plan in super().axes():
            orders: Iterable[tuple[int, ...]] = [()] if plan.pipeline == 1 else self._cluster.orders
            for order in self._choices("order", orders):
                found = msgspec.structs.replace(plan, order=order)
                if not self._problem(found):
                    yield found

    def stages(self, root: TrainingPlan) -> list[TrainingPlan]:
        """The plans of these axes with all stages and rows."""
        found = []
        for base in super().stages(root):
            name, values = self._uneven(base)
            found += [msgspec.structs.replace(base, **{name: value}) for value in values]
        return found

    def count(self, axes: TrainingPlan) -> int:
        """How many plans have these axes."""
        stages = [msgspec.structs.replace(axes, **each) for each in self._stage_fields(axes)]
        return sum(len(self._uneven(plan)[1]) * len(self._sharing_fields(plan)) for plan in stages)

    def _uneven(self, plan: TrainingPlan) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """The layers of a pipeline, or else the rows, that a plan can have."""
        name, other = ("layers", "rows") if plan.pipeline > 1 else ("rows", "layers")
        if self._fixed.get(other):
            return name, ()
        if name in self._fixed:
            fixed = msgspec.structs.replace(plan, **{name: self._fixed[name]})
            return name, () if self._problem(fixed) else (self._fixed[name],)
        if name == "layers":
            key = plan.order, plan.pipeline, plan.interleave
            if key not in self._layers:
                blocks = tuple(self._cluster.blocks(plan.order, plan.pipeline))
                self._layers[key] = uneven_layers(blocks, plan.interleave, self.job.shape.layers)
            return name, self._layers[key]
        if self._runtime is not None:  # it gives all data ranks equal rows
            return name, ((),)
        size, placed = plan.context * plan.tensor, self._cluster.placed(plan.order)
        cut = plan.expert > 1 or any(each.begin % size or each.end % size for each in placed)
        counts = () if cut else tuple((each.end - each.begin) // size for each in placed)
        return name, uneven_rows(counts, plan.data * plan.micro_batch)


MOST_WAYS = 1 << 14
"""Layers of stages, or rows, that are tried for the same axes."""


def uneven_layers(blocks: tuple[tuple[int, ...], ...], unit: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """The layers of the ranks of a pipeline that are tried, in multiples of `unit` (interleaved stages).

    `blocks` are the kinds of hosts of each rank. A rank on several kinds has as many as the one before.
    Example: uneven_layers(((0,), (1,)), 1, 3) == ((1, 2), (2, 1)).
    """
    kinds: list[tuple[int, ...]] = []
    for block in blocks:
        kinds.append(kinds[-1] if len(block) > 1 and kinds else block)
    each = list(dict.fromkeys(kinds))
    counts = [kinds.count(kind) for kind in each]
    if layers % unit:
        return ()
    units, found = layers // unit, set()
    most = [range(1, units // count + 1) for count in counts[:-1]]
    tails = range(MOST_TAIL + 1 if len(counts) < MOST_KINDS else 1)
    if math.prod(map(len, most)) > MOST_WAYS:
        return ()
    for given, tail in itertools.product(itertools.product(*most), tails):
        rest = units + tail - sum(one * count for one, count in zip(given, counts, strict=False))
        if rest < counts[-1]:
            continue
        last = -(-rest // counts[-1])
        of_kind = dict(zip(each, [*given, last], strict=True))
        tried = [of_kind[kind] for kind in kinds]
        tried[-1] -= tail
        for at in range(len(kinds) - last * counts[-1] + rest, len(kinds)):
            tried[at] -= 1
        if min(tried) >= 1:
            found.add(tuple(one * unit for one in tried))
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def uneven_rows(counts: tuple[int, ...], total: int) -> tuple[tuple[int, ...], ...]:
    """The rows of each kind's data ranks that are tried, `total` of all; () stands for equal ones.

    `counts` are the data ranks of each kind; (): data ranks are on several kinds. Only equal ones are tried
    where there are more than `MOST_WAYS`.
    Example: uneven_rows((3, 1), 8) == ((), (1, 5)).
    """
    found: list[tuple[int, ...]] = [()]
    most = [range(1, total // count + 1) for count in counts[:-1]]
    if not counts or math.prod(map(len, most)) > MOST_WAYS:
        return ((),)
    for given in itertools.product(*most):
        rest = total - sum(each * count for each, count in zip(given, counts, strict=False))
        rows = (*given, rest // counts[-1])
        if rest > 0 and rest % counts[-1] == 0 and len(set(rows)) > 1:
            found.append(rows)
    return tuple(found)
