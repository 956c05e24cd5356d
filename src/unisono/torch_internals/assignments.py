"""What an assignment to a DTensor leaves unnoticed: `p.data = t` changes the wrapper, not what it wraps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .probe import PrivateName, find

NAMES = {
    "wrapped": PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor",
        purpose="refuse p.data = t of a parameter that is cut or sharded",
        without="it has no effect, and raises no error",
    ),
}


def version_of(tensor: Any) -> int:
    """How often the values of a tensor, or what it wraps, were written in place."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return 0 if inner.is_inference() else int(inner._version)


class WrappedTensors:
    """The memory of DTensors as it was: of each wrapper, and of what it wraps."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        known = find(NAMES["wrapped"]) is not None
        cut: list[tuple[str, Any]] = [pair for pair in named if known and isinstance(pair[1], DTensor)]
        self._marks = [_mark(name, value) for name, value in cut]

    def assigned(self) -> str | None:
        """The name of one that has other memory now; None: none has.

        Module.to swaps wrapper and wrapped together: then the values are the same.
        """
        for number, (name, value, wrapper, inner, storage) in enumerate(self._marks):
            now = getattr(value, "_local_tensor", None)
            if now is inner and value.untyped_storage() is wrapper:
                continue
            if now is None or now is inner or now.untyped_storage() is not storage:
                return name
            self._marks[number] = _mark(name, value)
        return None


def _mark(name: str, value: Any) -> tuple[str, Any, Any, Any, Any]:
    inner = value._local_tensor
    return name, value, value.untyped_storage(), inner, inner.untyped_storage()
