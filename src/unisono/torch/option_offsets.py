"""Reads PyTorch's options from memory, in a twentieth of the time of their attributes.

`dist.all_reduce(x)` makes new options for every call. Three of their fields read as attributes take 2.4 us,
three times what the engine needs for the reduction. So the offset of each field in the C++ object is found
once: this module writes to the field and compares the bytes. From then on native code reads it there. Where
an offset is not certain, the attributes are read.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono import _native as native
from unisono.torch_internals.c10d import ReduceOp

from .arguments import REDUCE_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ASYNC", "by_attributes", "reader"]

ASYNC = 1 << 40
"""In what a reader returns: the call is asynchronous."""

PLAIN_OPS = tuple(getattr(ReduceOp, op.name.upper()) for op in REDUCE_OPS)


def reader(kind: Any) -> Callable[[Any], int]:
    """Return a function that reads options of `kind`.

    Its result is 256 x root rank + number of the reduce operation, with 0 for a field that the kind does not
    have, + `ASYNC` for an asynchronous call. It is -1 for a timeout, an operation with a factor, and options
    of another kind.
    """
    try:
        read: Callable[[Any], int] = native.OptionOffsets(kind, **_places(kind), ops=len(PLAIN_OPS)).read
    except LookupError:
        return partial(by_attributes, kind)
    return read


def by_attributes(kind: Any, opts: Any) -> int:
    """Read options by their attributes; see `reader`."""
    if type(opts) is not kind or opts.timeout.days >= 0:
        return -1
    later = ASYNC if opts.asyncOp else 0
    op = hash(opts.reduceOp) if hasattr(opts, "reduceOp") else 0
    root: int = getattr(opts, "rootRank", 0)
    return later + 256 * root + op if op < len(PLAIN_OPS) and root >= 0 else -1


def _places(kind: Any) -> dict[str, int]:
    """The offsets of the fields, in bytes.

    Raises:
        LookupError: an offset is not certain.
    """
    options = kind()
    ours = type(kind).__module__ == "pybind11_builtins" and hasattr(options, "asyncOp")
    if not ours or not hasattr(options, "timeout") or [*map(hash, PLAIN_OPS)] != [*range(len(PLAIN_OPS))]:
        raise LookupError(kind)
    timeouts = {timedelta(milliseconds=ms): _number(ms) for ms in (-1, 1, 86_400_007, 3)}
    return {
        "async_op": _place(options, "asyncOp", {True: b"\1", False: b"\0"}),
        "timeout": _place(options, "timeout", timeouts),
        "op": _place(options, "reduceOp", {op: bytes([hash(op)]) for op in PLAIN_OPS}),
        "root": _place(options, "rootRank", {root: _number(root) for root in (1, 70_000, 2, 0)}),
    }


def _place(options: Any, name: str, values: Mapping[Any, bytes]) -> int:
    """The one offset whose bytes change with the attribute as in `values`; -1: there is no such field."""
    if not hasattr(options, name):
        return -1
    seen = []
    for value, coded in values.items():
        setattr(options, name, value)
        seen.append((coded, native.value_bytes(options)))
    places = range(len(seen[0][1]))
    found = [at for at in places if all(held[at : at + len(coded)] == coded for coded, held in seen)]
    if len(found) != 1:
        raise LookupError(name)
    return found[0]


def _number(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder, signed=True)
