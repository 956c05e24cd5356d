"""The arrays of a call: values and codes, of NumPy or torch, in memory that does not overlap."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple

from unisono.engine.base.validation import listed
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, dtype_code, view

__all__ = ["CodecBuffer", "allocate", "check_no_overlap", "codes_of", "shape_of", "values_of"]

_F32 = dtype_code("float32")
_CODES = {2: ("int16", "float16", "bfloat16"), 1: ("uint8", "int8")}
_MOST = 2**62  # bytes: no machine has them, and no product of it overflows


class CodecBuffer(NamedTuple):
    """`numel` elements at `address`: f32 values, or bytes of codes."""

    address: int
    numel: int
    nbytes: int


def values_of(x: Any, name: str, *, writable: bool) -> CodecBuffer:
    """Look at f32 values.

    Raises:
        TypeError: it is no array, or not of float32.
        ValueError: it is not contiguous, not in CPU memory, or read-only.
    """
    address, numel, dtype = view(x, writable, name)
    if dtype != _F32:
        raise TypeError(f"{name} is {DTYPES[dtype]}, expected float32; convert it first")
    return CodecBuffer(address, numel, 4 * numel)


def codes_of(codes: Any, itemsize: int, name: str, *, writable: bool) -> CodecBuffer:
    """Look at codes of `itemsize` bytes: elements of this size, or bytes.

    Raises:
        TypeError: it is no array, or of another dtype.
        ValueError: it is not contiguous, not in CPU memory, or read-only.
    """
    address, numel, dtype = view(_as_known(codes), writable, name)
    if DTYPES[dtype] not in _CODES[itemsize] and DTYPES[dtype] != "uint8":
        expected = "uint16 or uint8" if itemsize == 2 else "uint8"
        raise TypeError(f"{name} is {DTYPES[dtype]}, expected codes as {expected}")
    nbytes = numel * ITEMSIZES[dtype]
    if nbytes % itemsize:
        raise ValueError(f"{name} has {nbytes} bytes, and a code has {itemsize}")
    return CodecBuffer(address, nbytes // itemsize, nbytes)


def _as_known(codes: Any) -> Any:
    """Codes of uint16, which collectives do not know, as int16."""
    name = str(getattr(codes, "dtype", ""))
    if name == "uint16":
        import numpy as np

        return codes.view(np.int16)
    if name == "torch.uint16":
        return codes.view(sys.modules["torch"].int16)
    return codes


def check_no_overlap(first: CodecBuffer, second: CodecBuffer, names: str) -> None:
    """Refuse arrays that share memory."""
    ends = first.address + first.nbytes, second.address + second.nbytes
    if first.address < ends[1] and second.address < ends[0]:
        raise ValueError(f"{names} share memory")


def shape_of(shape: Any) -> tuple[int, ...]:
    """The lengths of the axes.

    Raises:
        TypeError: they are no whole numbers.  ValueError: one is negative, or no machine has so much memory.
    """
    try:
        lengths = (
            (index(shape),)
            if not isinstance(shape, Iterable)
            else tuple(map(index, listed(shape, "shape", 64)))
        )
    except TypeError:
        raise TypeError(f"shape is {shape!r}, expected whole numbers") from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape is {list(lengths)}: a length is negative")
    if math.prod(lengths) > _MOST:
        raise ValueError(f"shape is {list(lengths)}: no machine has so much memory")
    return lengths


def allocate(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of the kind of `like`: torch's for a tensor, NumPy's otherwise."""
    if hasattr(like, "new_empty"):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype))
    import numpy as np

    return np.empty(shape, dtype)
