"""The plans of a job on hosts that differ: beside those of equal hosts, which host takes what.

The kinds of hosts are numbered in every order. Stages on hosts of one kind have equal layers, but for two
things: on two kinds the last rank has up to `MOST_TAIL` fewer, and what does not divide is missing on the
last stages. Without a pipeline, data ranks of one kind have equal rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from unisono.planner.cluster import MOST_KINDS
from unisono.planner.search import PlanTree
from unisono.planner.training_plan import LISTS, MOST_TAIL, TrainingJob, TrainingPlan

__all__ = ["ClusterTree", "tree_of", "uneven_layers", "uneven_rows"]


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
    if prod(map(len, most)) > MOST_WAYS:
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
    if not counts or prod(map(len, most)) > MOST_WAYS:
        return ((),)
    for given in itertools.product(*most):
        rest = total - sum(each * count for each, count in zip(given, counts, strict=False))
        rows = (*given, rest // counts[-1])
        if rest > 0 and rest % counts[-1] == 0 and len(set(rows)) > 1:
            found.append(rows)
    return tuple(found)
