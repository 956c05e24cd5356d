"""The signature of a collective is that of its method; this tells the engine's half how to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from unisono import _native
from unisono.reduction import ReduceOp

__all__ = ["collective"]

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS = (
    "collective", "out", "given", "op", "root", "algorithm", "reproducible", "async_op", "timeout",
    "codec", "between_hosts", "feedback", "max_error",
)  # fmt: skip
_DEFAULTS = (None, None, None, ReduceOp.SUM, 0, None, False, False, None, None, None, None, None)
_ROOTS = ("src", "dst")


def collective(*, out: str = "", given: str = "") -> Callable[[F], F]:
    """Make a method of `Group` a collective: its name, parameters and text are all that it has to say.

    A call goes to the engine at once where it repeats an earlier one; otherwise `Planner.plan` checks it.
    The body is never run.

    Args:
        out: the parameter that is its buffer, or its output.  given: its input, where it has one.
    Example: `@collective(out="out", given="x")` on `def all_gather(self, out, x, *, async_op=False)`
    """

    def make(method: F) -> F:
        code = method.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        positional = code.co_argcount - 1
        optional = positional - len(method.__defaults__ or ())
        places = [_place(name, out, given) for name in names]
        parameters = [
            (name, place, number < optional)
            for number, (name, place) in enumerate(zip(names, places, strict=True))
        ]
        defaults: list[object] = [method.__name__, *_DEFAULTS[1:]]
        made = _native.collective(method, defaults, parameters, positional)
        return cast("F", made)

    return make


def _place(name: str, out: str, given: str) -> int:
    if name == out:
        return _ARGUMENTS.index("out")
    if name == given:
        return _ARGUMENTS.index("given")
    return _ARGUMENTS.index("root" if name in _ROOTS else name)
