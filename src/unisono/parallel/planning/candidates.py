"""The plans of a model on some ranks: what `up.Plan` and the model allow, and what one step away is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from unisono.parallel.plan import Plan

__all__ = ["OPTIONAL", "SEARCHED", "changes", "divisors", "neighbours", "plans"]

SEARCHED = (
    "data", "tensor", "sequence", "pipeline", "zero", "shard", "micro_batches", "recompute", "context",
    "expert", "swap",
)  # fmt: skip
SWAPS = ("disk", "memory")
OPTIONAL = ("context", "expert", *SWAPS)
"""What is searched where it is asked for: axes, and where to swap."""

RECOMPUTE = (False, "selective", True)


def divisors(number: int) -> list[int]:
    """Of a number, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def plans(
    ranks: int, batch: int, fixed: Mapping[str, Any], *, host: int, axes: Collection[str] = ()
) -> Iterator[Plan]:
    """Every plan of so many ranks that `up.Plan` allows.

    Args:
        batch: rows of a step, which the data ranks and the micro-batches divide.
        fixed: fields that are given.    host: ranks of a host, in which a tensor axis stays.
        axes: of OPTIONAL, which are searched, too.
    """
    swaps = (fixed["swap"],) if "swap" in fixed else (None, *(each for each in SWAPS if each in axes))
    for data, tensor, pipeline, context in _meshes(ranks, fixed, axes):
        if batch % data or host % tensor:
            continue
        choices = itertools.product(
            (False, True) if tensor > 1 else (False,),
            _sharings(data, context),
            divisors(batch // data),
            RECOMPUTE,
            divisors(data * context) if "expert" in axes else (fixed.get("expert", 1),),
            swaps,
        )
        for sequence, (zero, shard), parts, recompute, expert, swap in choices:
            values = data, tensor, sequence, pipeline, zero, shard, parts, recompute, context, expert, swap
            made = _made(dict(zip(SEARCHED, values, strict=True)), fixed)
            if made is not None:
                yield made


def _meshes(
    ranks: int, fixed: Mapping[str, Any], axes: Collection[str]
) -> Iterator[tuple[int, int, int, int]]:
    """(data, tensor, pipeline, context) of so many ranks."""
    for pipeline in divisors(ranks):
        for tensor in divisors(ranks // pipeline):
            copies = ranks // pipeline // tensor
            for context in divisors(copies) if "context" in axes else (fixed.get("context", 1),):
                if copies % context == 0:
                    yield copies // context, tensor, pipeline, context


def _sharings(data: int, context: int = 1) -> list[tuple[int, int | None]]:
    """(zero, shard) of so many data ranks. Example: 4 has (0, None), (1, None), (1, 2), (2, None) ..."""
    if data * context == 1:
        return [(0, None)]
    return [(0, None), *((zero, shard) for zero in (1, 2, 3) for shard in (None, *divisors(data)[1:-1]))]


def _made(fields: dict[str, Any], fixed: Mapping[str, Any]) -> Plan | None:
    """The plan; None: the given fields are others, or `up.Plan` refuses it."""
    if any(name in fields and fields[name] != value for name, value in fixed.items()):
        return None
    try:
        return Plan(**{**fields, **fixed})
    except ValueError:
        return None


def neighbours(plan: Plan, ranks: int, batch: int, *, host: int, axes: Collection[str] = ()) -> list[Plan]:
    """The plans that differ from this one in one choice; a larger axis takes its ranks from the data axis."""
    found: list[Plan | None] = []

    def add(**fields: Any) -> None:
        if "pipeline" in fields:
            fields["cuts"] = None
        try:
            found.append(replace(plan, **fields))
        except ValueError:
            found.append(None)

    for axis in ("tensor", "pipeline", *({"context"} & set(axes))):
        size, data = getattr(plan, axis), plan.data
        for larger in divisors(data)[1:2]:
            more: dict[str, Any] = {"shard": None}
            more |= {"zero": 0} if data == larger and axis != "context" and plan.context == 1 else {}
            add(**{axis: size * larger, "data": data // larger, **more})
        for smaller in divisors(size)[1:2]:
            more = {"shard": None}
            more |= {"sequence": False} if axis == "tensor" and size == smaller else {}
            add(**{axis: size // smaller, "data": data * smaller, **more})
    for zero in (plan.zero - 1, plan.zero + 1):
        if 0 <= zero <= 3 and plan.copies > 1:
            add(zero=zero, shard=plan.shard if zero else None)
    sharings = [shard for zero, shard in _sharings(plan.data, plan.context) if zero == plan.zero]
    for shard in sharings:
        if shard != plan.shard:
            add(shard=shard)
    if "expert" in axes:
        spreads = divisors(plan.copies)
        here = spreads.index(plan.expert)
        for expert in spreads[max(0, here - 1) : here] + spreads[here + 1 : here + 2]:
            add(expert=expert)
    for swap in {None, *axes} & {None, *SWAPS}:
        if swap != plan.swap:
            add(swap=swap)
    for recompute in RECOMPUTE:
        if recompute != plan.recompute:
            add(recompute=recompute)
    if plan.tensor > 1:
        add(sequence=not plan.sequence)
    for parts in (plan.micro_batches // 2, plan.micro_batches * 2):
        if parts and batch // plan.data % parts == 0:
            add(micro_batches=parts)
    kept = [each for each in found if each is not None and each.ranks == ranks]
    return [each for each in kept if batch % each.data == 0 and host % each.tensor == 0]


def changes(plan: Plan, other: Plan) -> str:
    """The fields in which a plan differs from another, such as "data=8, zero=1"."""
    pairs = ((name, getattr(plan, name)) for name in SEARCHED if getattr(plan, name) != getattr(other, name))
    return ", ".join(f"{name}={value}" for name, value in pairs)
