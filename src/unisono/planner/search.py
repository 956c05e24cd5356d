"""The search: all plans of a job, the fastest that fit, exactly; and why not the plans beside one.

Plans are a tree: axes and micro-batches, then stages and recomputation, then what is shared, swapped and
coded. Each inner node has a bound of its time, which is cheap, and one of its memory. The tree is visited in
the order of the bounds of time, until none can beat the plans that were found.

On hosts that differ plans say, beside that, which host takes what. The kinds of hosts are numbered in every
order. Stages on hosts of one kind have equal layers, but for two things: on two kinds the last rank has up to
`MOST_TAIL` fewer, and what does not divide is missing on the last stages. Without a pipeline, data ranks of
one kind have equal rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from unisono.planner.choice import RefusedPlan, nearest_first
from unisono.planner.hardware import MOST_KINDS, Cluster
from unisono.planner.memory import MemoryUse
from unisono.planner.plan_model import PlanModel
from unisono.planner.step_time import StepTime
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


def divisors(number: int) -> list[int]:
    """All of them. Example: divisors(12) == [1, 2, 3, 4, 6, 12]."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def beside(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger one. Example: beside([1, 2, 4, 8], 4) == [2, 8]."""
    return [*[each for each in values if each < value][-1:], *[each for each in values if each > value][:1]]


def other_meshes(plan: Any, axes: Iterable[str]) -> Iterator[dict[str, int]]:
    """These axes larger or smaller by a prime factor, which is taken from the data axis or given to it.

    Example: data=6 and tensor=2 give tensor=4, data=3 and tensor=1, data=12.
    """
    for axis in axes:
        size, data = getattr(plan, axis), plan.data
        yield from ({axis: size * by, "data": data // by} for by in divisors(data)[1:2])
        yield from ({axis: size // by, "data": data * by} for by in divisors(size)[1:2])


class PlanTree:
    """The space of a job's plans that have some fixed fields, and that the runtime runs, as a tree.

    Which stages and which sharings there are depends on few numbers: they are found once for each.

    Raises:
        ValueError: a field is fixed that only hosts that differ have.
    """

    def __init__(self, job: TrainingJob, fixed: Mapping[str, Any], runtime: Runtime | None = None) -> None:
        if job.cluster is None and (named := [name for name in LISTS if fixed.get(name)]):
            raise ValueError(f"{named[0]} is for hosts that differ: give hosts")
        self.job, self._fixed, self._runtime = job, fixed, runtime
        self._stages: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._sharings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._layers: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}

    def __iter__(self) -> Iterator[TrainingPlan]:
        """All plans of the space."""
        for root in self.axes():
            for stages in self.stages(root):
                yield from self.sharings(stages)

    def axes(self) -> Iterator[TrainingPlan]:
        """Axes, micro-batches, orders and recomputations of all plans: the roots of the tree.

        Without a pipeline the order makes no difference.
        """
        job, ranks = self.job, self.job.ranks
        for tensor in self._choices("tensor", divisors(ranks)):
            for context in self._choices("context", divisors(ranks // tensor)):
                for pipeline in self._choices("pipeline", divisors(ranks // tensor // context)):
                    data = self._fixed.get("data", ranks // tensor // context // pipeline)
                    if data * tensor * context * pipeline != ranks or job.batch % data:
                        continue
                    plan = TrainingPlan(data=data, tensor=tensor, context=context, pipeline=pipeline)
                    if self._problem(plan):
                        continue
                    choices: dict[str, Iterable[Any]] = {
                        "compute": job.computes or ("",),
                        "expert": divisors(data) if job.shape.experts is not None else [1],
                        "micro_batch": divisors(job.batch // data),
                        "sequence": [False, True],
                        "order": [()] if job.cluster is None or pipeline == 1 else job.cluster.orders,
                    }
                    for _, found in self._allowed(plan, **choices):
                        again = self._choices("recompute", RECOMPUTE)
                        roots = (msgspec.structs.replace(found, recompute=each) for each in again)
                        yield from (root for root in roots if self._stage_fields(root))

    def stages(self, root: TrainingPlan) -> list[TrainingPlan]:
        """The plans of a root with all stages; on hosts that differ with all rows."""
        found = [msgspec.structs.replace(root, **fields) for fields in self._stage_fields(root)]
        if self.job.cluster is None:
            return found
        uneven = ((base, *self._uneven(base, self.job.cluster)) for base in found)
        return [
            msgspec.structs.replace(base, **{name: value})
            for base, name, values in uneven
            for value in values
        ]

    def sharings(self, stages: TrainingPlan) -> Iterator[TrainingPlan]:
        """The plans of these stages with all that is shared, swapped and coded."""
        for fields in self._sharing_fields(stages):
            yield msgspec.structs.replace(stages, **fields)

    def count(self, root: TrainingPlan) -> int:
        """How many plans a root has."""
        if (cluster := self.job.cluster) is not None:
            stages = [msgspec.structs.replace(root, **each) for each in self._stage_fields(root)]
            return sum(
                len(self._uneven(plan, cluster)[1]) * len(self._sharing_fields(plan)) for plan in stages
            )
        alike = Counter(each["schedule"] for each in self._stage_fields(root))
        plans = ((number, msgspec.structs.replace(root, schedule=name)) for name, number in alike.items())
        return sum(number * len(self._sharing_fields(plan)) for number, plan in plans)

    def _problem(self, plan: TrainingPlan) -> str:
        return plan.problem(self.job, self._runtime)

    def _choices(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        return [self._fixed[name]] if name in self._fixed else values

    def _stage_fields(self, root: TrainingPlan) -> list[dict[str, Any]]:
        count, size = root.micro_batches(self.job.batch), root.pipeline
        key = size, count % size == 0, count >= size, root.recompute, self._of_runtime(root)
        if key not in self._stages:
            chunks = divisors(-(-self.job.shape.layers // size)) if size > 1 else [1]
            tails = range(MOST_TAIL + 1) if size > 1 else [0]
            found = self._allowed(root, interleave=chunks, tail=tails, schedule=SCHEDULES)
            self._stages[key] = [fields for fields, _ in found]
        return self._stages[key]

    def _sharing_fields(self, stages: TrainingPlan) -> list[dict[str, Any]]:
        spread = (stages.expert, stages.context) if stages.expert > 1 else (1, min(stages.context, 2))
        others = stages.ranks > stages.data
        key = (stages.data, others, stages.schedule, stages.compute, *spread, self._of_runtime(stages))
        if key not in self._sharings:
            swaps = SWAPS if self.job.hardware.host is not None else SWAPS[:1]
            shards = [0, *divisors(stages.data)[1:-1]]
            codecs = ("none", *self.job.codecs)
            found = self._allowed(stages, zero=range(4), shard=shards, swap=swaps, codec=codecs)
            self._sharings[key] = [fields for fields, _ in found]
        return self._sharings[key]

    def _of_runtime(self, plan: TrainingPlan) -> TrainingPlan | None:
        """What a runtime may look at; the rules of `TrainingPlan.problem` look at less."""
        return None if self._runtime is None else msgspec.structs.replace(plan, micro_batch=1)

    def _allowed(
        self, base: TrainingPlan, **choices: Iterable[Any]
    ) -> Iterator[tuple[dict[str, Any], TrainingPlan]]:
        """The combinations of these fields which `base` can have, and what it is with them."""
        values = (self._choices(name, each) for name, each in choices.items())
        for chosen in itertools.product(*values):
            fields = dict(zip(choices, chosen, strict=True))
            found = msgspec.structs.replace(base, **fields)
            if not self._problem(found):
                yield fields, found

    def _uneven(self, plan: TrainingPlan, cluster: Cluster) -> tuple[str, tuple[tuple[int, ...], ...]]:
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
                blocks = tuple(cluster.blocks(plan.order, plan.pipeline))
                self._layers[key] = uneven_layers(blocks, plan.interleave, self.job.shape.layers)
            return name, self._layers[key]
        if self._runtime is not None:  # it gives all data ranks equal rows
            return name, ((),)
        size, placed = plan.context * plan.tensor, cluster.placed(plan.order)
        cut = plan.expert > 1 or any(each.begin % size or each.end % size for each in placed)
        counts = () if cut else tuple((each.end - each.begin) // size for each in placed)
        return name, uneven_rows(counts, plan.data * plan.micro_batch)


MOST_WAYS = 1 << 14
"""Layers of stages, or rows, that are tried for the same axes."""


def uneven_layers(blocks: tuple[tuple[int, ...], ...], unit: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """The layers of the ranks of a pipeline that are tried, in multiples of `unit` (interleaved stages).

    `blocks` are the kinds of hosts of each rank. A rank on several kinds has as many as the one before. Where
    there are more than `MOST_WAYS`, multiples of a larger step are tried beside equal ones.
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
    ways, equal = math.prod(units // count for count in counts[:-1]), units // len(kinds)
    step = max(1, math.ceil((ways / MOST_WAYS) ** (1 / max(1, len(counts) - 1))))
    most = [range(equal % step or step, units // count + 1, step) for count in counts[:-1]]
    tails = range(MOST_TAIL + 1 if len(counts) < MOST_KINDS else 1)
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


ROUNDING = 1e-9
"""A bound and a price add the same numbers in different orders."""


class PricedPlan(NamedTuple):
    """A plan, its step and its fullest rank: what that may use, and what is missing; 0: the plan fits."""

    plan: TrainingPlan
    time: StepTime
    memory: MemoryUse
    limit_bytes: int
    excess_bytes: int

    @property
    def seconds(self) -> dict[str, float]:
        """Those of the step by cause."""
        return self.time._asdict()

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of the fullest rank by cause."""
        return self.memory._asdict()

    @property
    def memory_bytes(self) -> int:
        """Their sum."""
        return self.memory.total

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


def price(model: PlanModel, plan: TrainingPlan) -> PricedPlan:
    """A plan with its time and memory."""
    return PricedPlan(plan, model.step(plan), *model.memory(plan))


def search(model: PlanModel, tree: PlanTree, count: int) -> SearchResult:
    """The `count` fastest plans of a space that fit."""
    limit_bytes, roots = model.job.limit_bytes, list(tree.axes())
    leanest = [each for each in roots if model.least_of_axes_bytes(each) <= limit_bytes]
    best: list[PricedPlan] = []
    for bound_s, stages in _by_bound(leanest, tree.stages, model.least_of_axes_s, model.least_s):
        if len(best) == count and bound_s * (1 - ROUNDING) > best[-1].time.total:
            break
        parts = model.parts(stages)
        if model.least_bytes(stages, parts) > limit_bytes:
            continue
        for plan in tree.sharings(stages):
            memory = model.memory(plan, parts)
            if not memory.excess_bytes:
                found = PricedPlan(plan, model.step(plan, parts), *memory)
                if len(best) < count or found.time.total <= best[-1].time.total:
                    best = sorted([*best, found], key=lambda each: each.order)[:count]
    smallest = None if best else _smallest(model, tree, roots)
    return SearchResult(best, sum(map(tree.count, roots)), smallest)


def _smallest(model: PlanModel, tree: PlanTree, roots: list[TrainingPlan]) -> PricedPlan | None:
    """The plan that needs least memory, as if all hosts had the limit of the job."""
    best: tuple[float, TrainingPlan] | None = None
    for bound, stages in _by_bound(roots, tree.stages, model.least_of_axes_bytes, model.least_bytes):
        if best is not None and bound * (1 - ROUNDING) > best[0]:
            break
        parts = model.parts(stages)
        for plan in tree.sharings(stages):
            memory = model.memory(plan, parts)
            total = memory.use.total + model.job.limit_bytes - memory.limit_bytes
            if best is None or total < best[0]:
                best = total, plan
    return None if best is None else price(model, best[1])


def _by_bound(
    roots: Iterable[TrainingPlan],
    below: Callable[[TrainingPlan], Iterable[TrainingPlan]],
    least_of_root: Callable[[TrainingPlan], float],
    least: Callable[[TrainingPlan], float],
) -> Iterator[tuple[float, TrainingPlan]]:
    """The nodes below some roots in the order of their bounds; roots are opened as late as can be."""
    number = itertools.count()  # orders those with equal bounds

    def opened(node: tuple[Any, ...]) -> Iterable[tuple[Any, ...]] | None:
        bound, _, root, plan = node
        if not root:
            return None
        return ((max(least(each), bound), next(number), False, each) for each in below(plan))

    found: list[tuple[Any, ...]] = [(least_of_root(plan), next(number), True, plan) for plan in roots]
    return ((bound, plan) for bound, _, _, plan in best_first(found, opened))


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


def refused_neighbours(
    model: PlanModel, chosen: PricedPlan, runtime: Runtime | None = None
) -> list[RefusedPlan]:
    """All plans one step away, those that memory refuses first, then the nearest."""
    return nearest_first(_refused(model, chosen, plan, runtime) for plan in _neighbours(model, chosen.plan))


def _refused(
    model: PlanModel, chosen: PricedPlan, plan: TrainingPlan, runtime: Runtime | None
) -> RefusedPlan:
    change = plan.changes(chosen.plan)
    if problem := plan.problem(model.job, runtime):
        return RefusedPlan(change, problem, 0, None, ("", 0.0))
    priced = price(model, plan)
    now, more = priced.seconds, priced.time.total - chosen.time.total
    seconds, name = max((now[name] - before, name) for name, before in chosen.seconds.items())
    return RefusedPlan(change, "", priced.excess_bytes, more, (name, seconds))


def _neighbours(model: PlanModel, plan: TrainingPlan) -> Iterator[TrainingPlan]:
    job = model.job

    def changed(**fields: Any) -> TrainingPlan:
        return msgspec.structs.replace(plan, **fields)

    meshes = other_meshes(plan, ("tensor", "context", "pipeline"))
    yield from (_valid(changed(**each)) for each in meshes)
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
