"""NumPy arrays whose elements do not lie one behind another: a copy moves, and is written back at the end.

The engine moves contiguous memory. Such an array is packed in the order of its indices, in one pass, before
its call; the call's output is unpacked after it, by whoever sees its end first. A failed call writes nothing.
Other arrays do not pass here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_STEPS = 10_000
"""The work that NumPy may spend on whether two arrays share memory; beyond it they count as sharing."""


def is_strided(x: Any) -> bool:
    """Whether it is such an array, or a list with one."""
    if isinstance(x, (list, tuple)):
        return any(map(is_strided, x))
    return type(x).__module__ == "numpy" and hasattr(x, "flags") and not x.flags.c_contiguous


class Unpacking:
    """What writes packed outputs back, once, however many threads see the end of their call."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Array, Array]] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def output(self, x: Array, packed: Array, name: str) -> None:
        """`packed` will be written back to `x`.

        Raises:
            ValueError: x is read-only, some of its elements share memory, or it shares memory with another
                output.
        """
        import numpy as np

        if not x.flags.writeable:
            raise ValueError(f"{name} is read-only, and the operation writes to it")
        if _repeats(x):
            raise ValueError(
                f"{name} has elements that share memory (shape {x.shape}, strides {x.strides}), and the "
                f"operation writes to it; use y = {name}.copy()"
            )
        for other, _ in self._pairs:
            if share_memory(x, other):
                raise ValueError(f"two arrays of {name.partition('[')[0]} overlap in memory")
        self._pairs.append((np.asarray(x), packed))

    @property
    def outputs(self) -> list[Array]:
        """The arrays that will be written."""
        return [x for x, _ in self._pairs]

    def __call__(self, nbytes: int | None = None) -> None:
        """Write back; of one output the first `nbytes` alone, in the order of its indices."""
        with self._lock:
            for x, packed in self._pairs:
                if nbytes is None or nbytes == packed.nbytes:
                    x[...] = packed
                else:
                    numel = nbytes // packed.itemsize
                    x.flat[:numel] = packed.reshape(-1)[:numel]
            self._pairs = []


def pack(x: Any, unpacking: Unpacking | None, name: str, *, read: bool = True) -> Any:
    """A contiguous array in the place of one that is not, also in a list; others as they are.

    Args:
        unpacking: takes what the call writes; None: it only reads.  read: it reads the elements, too.
    Raises:
        ValueError: see `Unpacking.output`.  MemoryError: there is no room for a contiguous one.
    """
    import numpy as np

    if isinstance(x, (list, tuple)):
        made = [pack(one, unpacking, f"{name}[{i}]", read=read) for i, one in enumerate(x)]
        if unpacking is not None:
            _check_plain(x, unpacking, name)
        return made
    if not is_strided(x):
        return x
    packed = np.array(x, order="C") if read else np.empty(x.shape, x.dtype)
    if unpacking is not None:
        unpacking.output(x, packed, name)
    return packed


def pack_sides(
    out: Any, sendbuf: Any, written: bool, keeps: bool, names: tuple[str, str]
) -> tuple[Any, Any, Callable[[], None] | None]:
    """(output, input, what writes the output back) of a collective.

    Args:
        written: this rank's output is written.  keeps: some of its elements are read, or may not be written.
    """
    unpacking = Unpacking() if written else None
    same = sendbuf is out
    out = pack(out, unpacking, names[0], read=keeps or same or not written)
    sendbuf = out if same else pack(sendbuf, None, names[1])
    return out, sendbuf, unpacking or None


def share_memory(x: Array, other: Any) -> bool:
    """Whether two arrays have an element in common; True also where that takes long to find out."""
    import numpy as np

    try:
        return np.shares_memory(x, np.asarray(other), max_work=MOST_STEPS)  # type: ignore[arg-type]
    except RuntimeError:  # np.exceptions.TooHardError, whose name older NumPy has elsewhere
        return True


def _check_plain(arrays: list[Any] | tuple[Any, ...], unpacking: Unpacking, name: str) -> None:
    """Check the contiguous outputs of a list against its others; among themselves the call checks them."""
    import numpy as np

    for plain in arrays:
        if not isinstance(plain, np.ndarray) or is_strided(plain):
            continue
        if any(share_memory(plain, other) for other in unpacking.outputs):
            raise ValueError(f"two arrays of {name} overlap in memory")


def _repeats(x: Array) -> bool:
    """Whether two elements may share memory: slices and transposes of an array never do."""
    reach = x.itemsize
    for stride, length in sorted(zip(map(abs, x.strides), x.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False
