"""A group's collectives as native objects: a small call spends less on being a method than on its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono import _native
from unisono.group.calls import Caller
from unisono.group.collectives import SUM, Collectives

__all__ = ["methods"]

_OUT, _GIVEN, _OP, _ROOT = 1, 2, 3, 4
_PLACES = {
    "all_gather": (_OUT, _GIVEN),
    "all_reduce": (_OUT, _OP),
    "all_to_all": (_OUT, _GIVEN),
    "barrier": (),
    "broadcast": (_OUT, _ROOT),
    "exclusive_scan": (_OUT, _OP),
    "gather": (_GIVEN, _OUT, _ROOT),
    "reduce": (_OUT, _ROOT, _OP),
    "reduce_scatter": (_OUT, _GIVEN, _OP),
    "scan": (_OUT, _OP),
    "scatter": (_OUT, _GIVEN, _ROOT),
}
"""Which of the words of `Caller.again` each parameter without `*` is, in the order of the method's."""


def methods(plain: Collectives, cls: type[Collectives]) -> dict[str, Callable[..., Any]]:
    """Callables to stand in the place of a group's collectives: they behave as those of `Collectives` do.

    Args:
        plain: what they hold; not the group, which would be kept alive by its own attributes.
        cls: the group's class; what it overrides is left to it.
    """
    return {
        name: _method(plain._caller, getattr(plain, name), name, places)
        for name, places in _PLACES.items()
        if getattr(cls, name) is getattr(Collectives, name)
    }


def _method(caller: Caller, bound: Any, name: str, places: tuple[int, ...]) -> Callable[..., Any]:
    code = bound.__func__.__code__
    names = code.co_varnames[1 : code.co_argcount]
    required = len(names) - len(bound.__func__.__defaults__ or ())
    parameters = [
        (parameter, place, number < required)
        for number, (parameter, place) in enumerate(zip(names, places, strict=True))
    ]
    words = (name, None, None, SUM, 0)
    made: Callable[..., Any] = _native.method(caller.quick, bound, words, parameters)
    return made
