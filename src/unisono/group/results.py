"""Results that a call allocates: for an input without an output, or for a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.buffers import view
from unisono.checking import listed

__all__ = ["Result", "allocate"]

_NUMBERS = (bool, int, float, complex)
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "scan", "exclusive_scan")

Result = Callable[[], Any] | None


def allocate(kind: str, out: Any, given: Any, size: int, rank: int, root: int) -> tuple[Any, Any, Result]:
    """(output, input, result) of a call; `result` makes its return value; None: the caller gave the output.

    Example: ("all_gather", x, None) with x of shape [3] and 2 ranks -> an array of shape [2, 3], x
    """
    if kind in _IN_PLACE:
        if not isinstance(out, _NUMBERS):
            return out, given, None
        import numpy as np

        number = np.array([out])
        return number, None, number.item
    if kind in ("all_gather", "all_to_all", "reduce_scatter"):
        if out is not None and given is not None:
            return out, given, None
        given = out if given is None else given
        if kind == "all_gather":
            made = _new(given, (size, *_shape(given)))
        elif kind == "all_to_all":
            made = _new(given, _shape(given))
        else:
            made = _new(given, _block(given, size))
        return made, given, lambda: made
    if kind == "all_gather_v" and not isinstance(out, (list, tuple)):
        return listed(out, "out", size), given, None
    if kind == "gather" and out is None and rank == root and given is not None:
        made = _new(given, (size, *_shape(given)))
        return made, given, lambda: made
    return out, given, None


def _shape(x: Any) -> tuple[int, ...]:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        view(x, False)  # refuses broadcast arrays, whose shape may have more elements than memory holds
        return tuple(x.shape)
    raise TypeError(
        f"got {type(x).__name__} and no output; an array's result can be allocated, not this one's"
    )


def _block(x: Any, size: int) -> tuple[int, ...]:
    """The shape of one of `size` blocks: of an array with a leading axis of p, or of one that p divides."""
    shape = _shape(x)
    if shape and shape[0] == size:
        return shape[1:]
    if not shape or shape[0] % size:
        raise ValueError(f"inputs has shape {list(shape)}, expected a first axis that {size} ranks divide")
    return (shape[0] // size, *shape[1:])


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of the kind of `like`: torch's for a tensor, NumPy's otherwise."""
    if hasattr(like, "new_empty"):
        return like.new_empty(shape)
    import numpy as np

    return np.empty(shape, like.dtype)
