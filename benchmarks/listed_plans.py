"""Plans as text, for planner_machine.py.

"context=2;expert=2,zero=1;pipeline=2,schedule=zbv,micro_batches=4" has three. A plan that gives no `data`
takes all ranks: what its other axes leave. `compression` is a codec, such as int8, or rank4.
"""

from __future__ import annotations

import re
from typing import Any

import unisono.parallel as up

__all__ = ["plans_of"]

WORDS = {"yes": True, "true": True, "no": False, "false": False, "none": None}


def plans_of(text: str, ranks: int) -> list[up.Plan]:
    """The plans of a text, for so many ranks.

    Raises:
        ValueError: a field or a value that no plan has, or other ranks; the text names the plan.
    Example: plans_of("tensor=2;zero=3", 4) is [Plan(data=2, tensor=2), Plan(data=4, zero=3)].
    """
    return [_plan(each.strip(), ranks) for each in text.split(";") if each.strip()]


def _plan(text: str, ranks: int) -> up.Plan:
    found: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (each.strip() for each in pair.partition("="))
        if not equals or name in found:
            raise ValueError(f"plan {text!r}: {pair!r}, expected FIELD=VALUE, each field once")
        found[name] = _compression(value) if name == "compression" else _value(value)
    try:
        alone = up.Plan(**{name: found[name] for name in ("tensor", "pipeline", "context") if name in found})
        plan = up.Plan(**{"data": max(1, ranks // alone.ranks), **found})
    except (TypeError, ValueError) as error:
        raise ValueError(f"plan {text!r}: {error}") from None
    if plan.ranks != ranks:
        raise ValueError(f"plan {text!r} has {plan.ranks} ranks, and there are {ranks}")
    return plan


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text


def _compression(text: str) -> up.Compressed | up.PowerSGD:
    rank = re.fullmatch(r"rank(\d{1,4})", text)
    return up.PowerSGD(rank=int(rank[1])) if rank else up.Compressed(text)
