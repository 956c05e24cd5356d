"""What PyTorch's options say of a call, read in a twentieth of the time that their attributes take.

`dist.all_reduce(x)` makes new options for every call. Three of their fields read as attributes take 2.4 us,
three times what the engine needs for the reduction. So where a field lies in the C++ object is found out
once, by writing to it and seeing which bytes change; from then on it is read there. This is done with the
versions of PyTorch that the tests ran on, `TESTED`. With others, and where it is not as clear as it should
be, the attributes are read.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ReduceOp

from unisono import _native as native

from .arguments import REDUCE_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["by_attributes", "reader"]

TESTED = ("2.13.0",)
"""Versions, without what names a build of them ("+cpu"). Add one when tests/torch passes on it."""

PLAIN_OPS = tuple(getattr(ReduceOp, op.name.upper()) for op in REDUCE_OPS)


def reader(kind: Any) -> Callable[[Any], int]:
    """Return a function that reads options of `kind`.

    Its result is 256 x root rank + number of the reduce operation, 0 for what the kind does not have. It is
    -1 for anything but a plain call: asynchronous, with a timeout, with an operation that carries a factor,
    and for options of another kind.
    """
    if torch.__version__.partition("+")[0] not in TESTED:
        return partial(by_attributes, kind)
    try:
        read: Callable[[Any], int] = native.Fields(kind, **_places(kind), ops=len(PLAIN_OPS)).read
    except LookupError:
        return partial(by_attributes, kind)
    return read


def by_attributes(kind: Any, opts: Any) -> int:
    """Read options the ordinary way; see `reader`."""
    if type(opts) is not kind or opts.asyncOp or opts.timeout.days >= 0:
        return -1
    op = hash(opts.reduceOp) if hasattr(opts, "reduceOp") else 0
    root: int = getattr(opts, "rootRank", 0)
    return 256 * root + op if op < len(PLAIN_OPS) and root >= 0 else -1


def _places(kind: Any) -> dict[str, int]:
    """Where the fields lie, in bytes.

    Raises:
        LookupError: that is not certain.
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
    """The one place whose bytes follow what the attribute is set to, as `values` tells; -1: no such field."""
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
