"""The plans of a model on some ranks: what `up.Plan` and the model allow, and what one step away is.

Where the model is a chain of pieces, also where its stages begin.

A field that is given has its value, or those of a list: `precision=["f32", "bf16"]` searches both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unisono.errors import UnfitError
from unisono.parallel.axes import NAMES
from unisono.parallel.pipeline.schedule import KINDS, schedule, splits_backward
from unisono.parallel.pipeline.stages import balance
from unisono.parallel.plan import Plan
from unisono.planner.search import beside, divisors, other_meshes

if TYPE_CHECKING:
    from unisono.parallel.costs.task import TrainingTask

    from .machine import JobMachine

SEARCHED = (
    "data", "tensor", "sequence", "pipeline", "schedule", "stages_per_rank", "zero", "shard",
    "micro_batches", "recompute", "context", "expert", "swap",
)  # fmt: skip
SWAPS = ("disk", "memory")
RECOMPUTE = (False, "selective", True)
MOST_MICRO_BATCHES = 2048
"""That are searched: a schedule of more takes seconds to price."""


def values(given: Mapping[str, Any], name: str, otherwise: Sequence[Any]) -> list[Any]:
    """The values of a field that are searched. Example: {"zero": [1, 3]}, "zero" -> [1, 3]."""
    found = given.get(name, list(otherwise))
    return found if isinstance(found, list) else [found]


def allows(given: Mapping[str, Any], plan: Plan) -> bool:
    """Whether a plan has the fields that are given."""
    return all(getattr(plan, name) in values(given, name, ()) for name in given)


def plans(
    ranks: int, batch: int, given: Mapping[str, Any], *, host: int, axes: Collection[str] = ()
) -> Iterator[Plan]:
    """Every plan of so many ranks that `up.Plan` allows.

    Args:
        batch: rows of a step, which the data ranks and the micro-batches divide.
        given: fields that are given.    host: ranks of a host, in which a tensor axis stays.
        axes: what is searched, too: "context", "expert", and of SWAPS.
    """
    others = [name for name in given if name not in SEARCHED]
    swaps = (None, *(each for each in SWAPS if each in axes))
    unsearched = [values(given, name, (1,)) for name in NAMES if name not in SEARCHED]
    rests = {ranks // n for sizes in itertools.product(*unsearched) if ranks % (n := math.prod(sizes)) == 0}
    meshes = (mesh for rest in sorted(rests) for mesh in _meshes(rest, given, axes))
    for data, tensor, pipeline, context in meshes:
        if batch % data or host % tensor:
            continue
        few = (each for each in divisors(batch // data) if each <= MOST_MICRO_BATCHES)
        parts = values(given, "micro_batches", tuple(few))
        choices = itertools.product(
            (False, True) if tensor > 1 else (False,),
            _schedules(pipeline, given),
            _sharings(data, ranks // (tensor * pipeline)),
            [each for each in parts if batch // data % each == 0],
            RECOMPUTE,
            divisors(data * context) if "expert" in axes else values(given, "expert", (1,)),
            values(given, "swap", swaps),
            *(values(given, name, ()) for name in others),
        )
        for sequence, timing, sharing, micros, recompute, expert, swap, *more in choices:
            searched = data, tensor, sequence, pipeline, *timing, *sharing, micros, recompute, context, expert
            made = _made(dict(zip((*SEARCHED, *others), (*searched, swap, *more), strict=True)), given)
            if made is not None and made.ranks == ranks:
                yield made


def _meshes(
    ranks: int, given: Mapping[str, Any], axes: Collection[str]
) -> Iterator[tuple[int, int, int, int]]:
    """(data, tensor, pipeline, context) of so many ranks."""
    for pipeline in divisors(ranks):
        for tensor in divisors(ranks // pipeline):
            copies = ranks // pipeline // tensor
            for context in divisors(copies) if "context" in axes else values(given, "context", (1,)):
                if copies % context == 0:
                    yield copies // context, tensor, pipeline, context


def _schedules(pipeline: int, given: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """(schedule, stages_per_rank) of a pipeline. One rank has one schedule."""
    if pipeline == 1:
        return [(values(given, "schedule", ("1f1b",))[0], values(given, "stages_per_rank", (None,))[0])]
    return [
        (name, stages)
        for name in values(given, "schedule", tuple(name for name, kind in KINDS.items() if kind.searched))
        for stages in values(given, "stages_per_rank", KINDS[name].searched or (None,))
    ]


def _sharings(data: int, copies: int) -> list[tuple[int, int | None]]:
    """(zero, shard) of so many data ranks. Example: 4 has (0, None), (1, None), (1, 2), (2, None) ..."""
    if copies == 1:
        return [(0, None)]
    return [(0, None), *((zero, shard) for zero in (1, 2, 3) for shard in (None, *divisors(data)[1:-1]))]


def _made(found: dict[str, Any], given: Mapping[str, Any]) -> Plan | None:
    """The plan; None: the given fields are others, or `up.Plan` refuses it."""
    if any(name in given and value not in values(given, name, ()) for name, value in found.items()):
        return None
    try:
        made = Plan(**found)
    except UnfitError:
        return None
    return None if _repeats(made, given) else made


def _repeats(plan: Plan, given: Mapping[str, Any]) -> bool:
    """Whether another plan that is searched does the same: no gradient of this one travels."""
    alone = plan.compression is not None and plan.copies == 1
    return plan.swaps_parts or (alone and None in values(given, "compression", ()))


def neighbours(
    plan: Plan,
    ranks: int,
    batch: int,
    *,
    host: int,
    axes: Collection[str] = (),
    given: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """The plans that differ from this one in one choice; a larger axis takes its ranks from the data axis."""
    given = given or {}
    timings = _schedules(plan.pipeline, given) if plan.pipeline > 1 else []
    here = plan.schedule, plan.stages_per_rank
    around = (
        *_other_meshes(plan, axes),
        *_other_sharings(plan),
        *(
            {"schedule": name, "stages_per_rank": stages}
            for name, stages in timings
            if (name, stages) != here
        ),
        *_other_steps(plan, batch, axes),
        *({name: value} for name in given for value in values(given, name, ())),
    )
    found = dict.fromkeys(made for each in around if (made := _changed(plan, each)) is not None)
    return [
        each
        for each in found
        if each != plan
        and each.ranks == ranks
        and batch % each.data == 0
        and batch // each.data >= each.micro_batches
        and host % each.tensor == 0
        and allows(given, each)
        and not _repeats(each, given)
    ]


def _changed(plan: Plan, change: dict[str, Any]) -> Plan | None:
    """The plan with these fields. What a schedule does not run gets 1F1B; None: `up.Plan` refuses it."""
    if change.keys() & {"pipeline", "schedule", "stages_per_rank"}:
        change = {**change, "cuts": change.get("cuts")}
    plain = {"schedule": "1f1b", "stages_per_rank": None, "cuts": None}
    if change.get("pipeline") == 1:
        change = {**change, **plain}
    tries = [change]
    if splits_backward(plan.schedule) and "schedule" not in change:
        tries.append({**change, **plain})
    for each in tries:
        try:
            return replace(plan, **each)
        except UnfitError:
            continue
    return None


def _other_meshes(plan: Plan, axes: Collection[str]) -> Iterator[dict[str, Any]]:
    for each in other_meshes(plan, ("tensor", "pipeline", *({"context"} & set(axes)))):
        more: dict[str, Any] = {"shard": None}
        more |= {"zero": 0} if each["data"] * each.get("context", plan.context) == 1 else {}
        yield {**each, **more, **({"sequence": False} if each.get("tensor") == 1 else {})}
    if "expert" in axes:
        yield from ({"expert": each} for each in beside(divisors(plan.copies), plan.expert))


def _other_sharings(plan: Plan) -> Iterator[dict[str, Any]]:
    for zero in (plan.zero - 1, plan.zero + 1):
        if 0 <= zero <= 3 and plan.copies > 1:
            yield {"zero": zero, "shard": plan.shard if zero else None}
    sharings = [shard for zero, shard in _sharings(plan.data, plan.copies) if zero == plan.zero]
    yield from _others(plan, "shard", sharings)


def _other_steps(plan: Plan, batch: int, axes: Collection[str]) -> Iterator[dict[str, Any]]:
    """Other ways to swap, to compute again, and to cut activations and batches."""
    yield from _others(plan, "swap", (None, *(each for each in SWAPS if each in axes)))
    yield from _others(plan, "recompute", RECOMPUTE)
    if plan.tensor > 1:
        yield {"sequence": not plan.sequence}
    for parts in (plan.micro_batches // 2, plan.micro_batches * 2):
        if parts and batch // plan.data % parts == 0:
            yield {"micro_batches": parts}


def _others(plan: Plan, name: str, found: Sequence[Any]) -> Iterator[dict[str, Any]]:
    return ({name: value} for value in found if value != getattr(plan, name))


def changes(plan: Plan, other: Plan) -> str:
    """The fields in which a plan differs from another, such as "data=8, zero=1"."""
    differ = [f.name for f in fields(plan) if getattr(plan, f.name) != getattr(other, f.name)]
    if "cuts" in differ and (plan.stages != other.stages or plan.cuts is None or other.cuts is None):
        differ.remove("cuts")  # they follow from the number of stages
    return ", ".join(f"{name}={getattr(plan, name)}" for name in differ)


# ---- where stages begin -----------------------------------------------------------------------------------

ROWS = 2  # of the recorded program


class StageCuts:
    """Cuts of the model of a task, a chain of pieces: by their work, the speed of ranks and their memory."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._known: dict[Any, list[tuple[int, ...]]] = {}

    def of(self, plan: Plan, machine: JobMachine) -> list[tuple[int, ...]]:
        """Cuts whose stages take alike long, and cuts that fill the memory of ranks alike; [] without pieces.

        1F1B keeps p - rank micro-batches on each of its p ranks: its first stages get fewer pieces then.
        """
        places = machine.of_places(plan)
        key = plan.pipeline, plan.schedule, plan.chunks, tuple(places)
        if key not in self._known:
            self._known[key] = self._found(plan, places)
        return self._known[key]

    def _found(self, plan: Plan, places: list[tuple[int, float]]) -> list[tuple[int, ...]]:
        if len(self._costs) < plan.stages:
            return []
        work, made = map(list, zip(*self._costs, strict=True))
        order = schedule(plan.schedule, plan.pipeline, 2 * plan.pipeline, plan.chunks)
        home = order.rank_of
        fast = balance(work, plan.stages, [1 / places[rank][1] for rank in home])
        kept = [order.kept(rank) for rank in home]
        lean = [count / places[rank][0] for count, rank in zip(kept, home, strict=True)]
        small = balance(made, plan.stages, [each / max(lean) for each in lean])
        return [*dict.fromkeys((fast, small))]

    @cached_property
    def _costs(self) -> list[tuple[float, float]]:
        """Of each piece: FLOPs and bytes of its forward, and the bytes that it makes."""
        task, found = self._task, list[tuple[float, float]]()
        pieces = task.structure(task.model, task.pieces).pieces
        if not pieces:
            return []
        graph, paths = task.graph(ROWS), {module: path for path, module in task.model.named_modules()}
        for piece in pieces:
            tops = [paths[module] for module in piece.modules() if module in paths]
            here = [frame for frame in graph.frames if frame.path in tops]
            nodes = {number for frame in here for number in range(frame.first, frame.last)}
            outputs = [n for number in nodes for n in graph.nodes[number].outputs if n is not None]
            made = sum(graph.values[n].nbytes for n in outputs)
            work = 1.0 + sum(graph.nodes[number].flops for number in nodes) + made
            found.append((work, 1.0 + made))
        return found
