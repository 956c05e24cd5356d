"""The table [costs] of a network's TOML file, and how a quantity of it is read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from unisono.networks import generators
from unisono.networks.costs import ByteCosts, Costs, InsideCosts
from unisono.networks.places import At, DescriptionError
from unisono.networks.quantities import nbytes, seconds, seconds_per_byte

__all__ = ["LARGER", "costs_of", "known", "quantity"]

_COSTS: dict[str, tuple[str, Callable[[object], float]]] = {
    "send": ("o_send_s", seconds),
    "receive": ("o_recv_s", seconds),
    "gap": ("g_s", seconds),
    "rendezvous": ("rendezvous_bytes", nbytes),
    "call": ("call_s", seconds),
    "wake": ("wake_s", seconds),
    "per_byte": ("o_s_per_byte", seconds_per_byte),
    "reduce": ("reduce_s_per_byte", seconds_per_byte),
    "copy": ("copy_s_per_byte", seconds_per_byte),
}
"""The keys of [costs]: the field of `Costs`, and the value's reader. Costs per byte are written as rates."""


def costs_of(value: Any, at: At, base: Costs = generators.CPU) -> Costs:
    """The costs of a table; what it does not name is that of `base`."""
    if not isinstance(value, dict):
        raise DescriptionError(at, f"is {value!r}, expected a table")
    known(value, at, {*_COSTS, "inside", "larger"})
    changes = {
        _COSTS[key][0]: quantity(_COSTS[key][1], each, at / key)
        for key, each in value.items()
        if key in _COSTS
    }
    if "inside" in value:
        changes["inside"] = _inside_costs(value["inside"], at / "inside")
    if "larger" in value:
        changes["larger"] = _larger(value["larger"], at / "larger")
    return msgspec.structs.replace(base, **changes)


_INSIDE: dict[str, tuple[str, Callable[[object], float]]] = {
    "send": ("send_s", seconds),
    "receive": ("recv_s", seconds),
    "write": ("write_s_per_byte", seconds_per_byte),
    "copy": ("s_per_byte", seconds_per_byte),
    "in_place": ("in_place_bytes", nbytes),
    "in_place_copy": ("in_place_s_per_byte", seconds_per_byte),
}


def _inside_costs(value: Any, at: At) -> InsideCosts:
    if not isinstance(value, dict):
        raise DescriptionError(at, f"is {value!r}, expected {{ send = '0.2 us', per_byte = '10 GB/s' }}")
    known(value, at, set(_INSIDE))
    return InsideCosts(
        **{_INSIDE[key][0]: quantity(_INSIDE[key][1], each, at / key) for key, each in value.items()}
    )


LARGER = {
    "per_byte": "send",
    "reduce": "reduce",
    "copy": "copy",
    "write": "write",
    "read": "read",
    "in_place": "in_place",
}
"""The keys of an entry of `larger`: the field of `ByteCosts`. All are rates."""


def _larger(value: Any, at: At) -> tuple[ByteCosts, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) and "than" in each for each in value):
        raise DescriptionError(at, f"is {value!r}, expected [{{ than = '1 MiB', copy = '10 GB/s' }}, ...]")
    found: list[ByteCosts] = []
    for number, each in enumerate(value):
        here = at / str(number)
        known(each, here, {"than", *LARGER})
        rates = {
            LARGER[key]: quantity(seconds_per_byte, rate, here / key)
            for key, rate in each.items()
            if key != "than"
        }
        found.append(ByteCosts(beyond_bytes=quantity(nbytes, each["than"], here / "than"), **rates))
    if any(one.beyond_bytes >= next_.beyond_bytes for one, next_ in pairwise(found)):
        raise DescriptionError(at, "has sizes that do not ascend")
    return tuple(found)


def quantity(reader: Callable[[object], float], value: Any, at: At) -> Any:
    """What a reader of `quantities` gives, or an error with the place."""
    try:
        return reader(value)
    except ValueError as error:
        raise DescriptionError(at, str(error)) from None


def known(table: dict[str, Any], at: At, known: set[str]) -> None:
    """Refuse other keys."""
    for key in table:
        if key not in known:
            raise DescriptionError(at / key, f"is unknown, expected one of {', '.join(sorted(known))}")
