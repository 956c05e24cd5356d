"""Makes a method of `Group` a native collective: the native code reads its arguments by its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from unisono import _native
from unisono.engine.operations.reduction import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS = (
    "collective", "out", "sendbuf", "op", "root", "algorithm", "reproducible", "async_op", "timeout",
    "codec", "between_hosts", "feedback", "max_error",
)  # fmt: skip
_DEFAULTS = (None, None, None, ReduceOp.SUM, 0, None, False, False, None, None, None, None, None)
_ROOTS = ("src", "dst")


def collective(*, out: str = "", sendbuf: str = "", coalesced: bool = False) -> Callable[[F], F]:
    """Make a method of `Group` a collective, from its name, its parameters and its docstring.

    A repeated call goes to the engine at once; `Planner.plan`, or `plan_coalesced`, checks a new one. The
    body never runs.

    Args:
        out: the parameter of its buffer, or of its output.  sendbuf: the parameter of its input, if any.
        coalesced: they are lists of buffers.
    Example: `@collective(out="out", sendbuf="x")` on `def all_gather(self, out, x, *, async_op=False)`
    """

    def make(method: F) -> F:
        code = method.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        positional = code.co_argcount - 1
        optional = positional - len(method.__defaults__ or ())
        places = [_place(name, out, sendbuf) for name in names]
        parameters = [
            (name, place, number < optional)
            for number, (name, place) in enumerate(zip(names, places, strict=True))
        ]
        made = _native.collective(
            method, [method.__name__, *_DEFAULTS[1:]], parameters, positional, coalesced
        )
        return cast("F", made)

    return make


def _place(name: str, out: str, sendbuf: str) -> int:
    if name == out:
        return _ARGUMENTS.index("out")
    if name == sendbuf:
        return _ARGUMENTS.index("sendbuf")
    return _ARGUMENTS.index("root" if name in _ROOTS else name)
