"""Results that a call allocates: for an input without an output, or for a number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono import _native
from unisono._native import ResultKind
from unisono.engine.base.validation import listed
from unisono.engine.memory.buffers import view
from unisono.engine.memory.strided import pack

_NUMBERS = (bool, int, float, complex)
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "scan", "exclusive_scan")
_SHAPES = {
    "all_gather": ResultKind.GATHERED,
    "all_to_all": ResultKind.SAME,
    "reduce_scatter": ResultKind.BLOCK,
    "gather": ResultKind.GATHERED,
}


class CallResult(NamedTuple):
    """What a call returns: an array that it has allocated, or the number in an array of one element.

    unpack: writes packed outputs back, see `strided`; whoever sees the end of the call calls it.
    """

    array: Any
    kind: ResultKind
    unpack: Callable[[], None] | None = None

    def value(self) -> Any:
        """The caller's result, after the call has run."""
        if self.kind is ResultKind.SCALAR:
            return self.array[0]
        return self.array.item() if self.kind is ResultKind.NUMBER else self.array


NOTHING = CallResult(None, ResultKind.NOTHING)


def allocate(
    kind: str, out: Any, sendbuf: Any, size: int, rank: int, root: int
) -> tuple[Any, Any, CallResult]:
    """(output, input, result) of a call; NOTHING: the caller gave the output.

    Example: ("all_gather", x, None) with x of shape [3] and 2 ranks -> an array of shape [2, 3], x
    """
    if kind in _IN_PLACE:
        numpy = sys.modules.get("numpy")  # without it there are none of its numbers
        if numpy is not None and type(out) is numpy.ndarray:
            return out, sendbuf, NOTHING
        found = _number(out)
        if found is NOTHING or (kind == "reduce" and rank != root):
            return (out if found is NOTHING else found.array), sendbuf, NOTHING
        return found.array, None, found
    if kind == "all_gather_v" and not isinstance(out, (list, tuple)):
        return listed(out, "out", size), sendbuf, NOTHING
    if kind not in _SHAPES or (out is not None and sendbuf is not None):
        return out, sendbuf, NOTHING
    if kind == "gather" and (out is not None or sendbuf is None or rank != root):
        return out, sendbuf, NOTHING
    sendbuf = out if sendbuf is None else sendbuf
    sendbuf = pack(sendbuf, None, "x")
    _check(sendbuf, _SHAPES[kind], size)
    result = _native.allocated(sendbuf, _SHAPES[kind], size)
    return result, sendbuf, CallResult(result, _SHAPES[kind])


def _number(out: Any) -> CallResult:
    """An array of one element that holds a number, also one of NumPy's; NOTHING: it is none."""
    numpy = sys.modules.get("numpy")  # without it there are none of its numbers
    scalar = numpy is not None and isinstance(out, numpy.generic)
    if not (scalar or isinstance(out, _NUMBERS)):
        return NOTHING
    import numpy as np

    number = np.array([out])
    return CallResult(number, ResultKind.SCALAR if scalar else ResultKind.NUMBER)


def _check(x: Any, shape: ResultKind, size: int) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"got {type(x).__name__} and no output; an array's result can be allocated, not this one's"
        )
    view(x, False)
    if shape is ResultKind.BLOCK and (not x.shape or x.shape[0] % size):
        raise ValueError(f"inputs has shape {list(x.shape)}, expected a first axis that {size} ranks divide")
