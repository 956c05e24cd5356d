"""Arrays in memory that the other ranks of a host can read in place, without a copy."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from unisono import _native
from unisono.engine.base.validation import listed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

MOST_AXES = 64
"""NumPy's own limit."""


def empty(shape: SupportsIndex | Iterable[SupportsIndex], dtype: DTypeLike = float) -> np.ndarray[Any, Any]:
    """A new array, as from `numpy.empty`, that collectives of any group read without a copy.

    It is an ordinary array. A rank that may not map this process's memory receives its bytes like those of
    any other array. Making one takes as long as clearing its memory: make it once, use it often. After a fork
    the child gets a copy of each page that it writes. Other pages are still the parent's, which may change or
    free them: so pass NumPy's arrays to forked workers.

    Args:
        shape: the lengths of the axes.  dtype: of the elements; none that holds Python objects.
    Returns: the array, C-contiguous. Its memory is freed when it and all views of it are gone.
    Raises:
        TypeError: elements of this dtype are Python objects.
        ValueError: a length is negative.
        MemoryError: there is not enough memory. A limit of a container may end the process instead, as for
            any other memory.
    """
    import numpy as np

    element, inner = np.dtype(dtype).subdtype or (dtype, ())  # NumPy has no arrays of "(2,)f4": it adds an axis
    wanted = np.empty(0, element).dtype
    if wanted.hasobject:
        raise TypeError(f"elements of {wanted} are Python objects, which other processes cannot read")
    lengths = _lengths(shape) + inner
    if any(length < 0 for length in lengths):
        raise ValueError(f"a length is negative: {lengths}")
    nbytes = math.prod(lengths) * wanted.itemsize
    try:
        memory = _native.shared_bytes(min(nbytes, sys.maxsize))
    except MemoryError:
        raise MemoryError(f"cannot make an array of {nbytes} bytes: not enough memory") from None
    except OSError:  # the system has no such memory, or limits it: make an ordinary array
        memory = np.zeros(nbytes, np.uint8)
    made: np.ndarray[Any, Any] = np.ndarray(lengths, wanted, buffer=memory)
    return made


def _lengths(shape: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return (index(shape),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(map(index, listed(shape, "shape", MOST_AXES)))  # type: ignore[arg-type]
