"""`Type`: the state of a datatype, and the tables of the named ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi.handle import State
from unisono.mpi.layout import Layout

named: dict[str, Any] = {}
"""The named datatypes by their names; named_types.py fills these two."""

codes: dict[str, Any] = {}
"""The named datatype of each character or string of NumPy."""


class Type(State):
    """The state of a datatype.

    dtype: NumPy's, where all elements are of one; None: a mixture.  code: that of the named type.
    types: of which it is made.  params: the arguments that made it.
    """

    def __init__(
        self, where: Layout, dtype: Any, combiner: int, types: tuple[Type, ...] = (), params: Any = None
    ) -> None:
        self.layout, self.dtype, self.combiner, self.types = where, dtype, combiner, types
        self.params: dict[str, Any] = params or {}
        self.code: str | None = None

    def swapped(self, packed: Any) -> Any:
        """Packed items with the bytes of each element in the other order."""
        if not packed.size:
            return packed
        rows, at = packed.reshape(-1, self.size), 0
        out = np.empty_like(rows)
        parts = 2 if self.dtype is not None and self.dtype.kind == "c" else 1
        for nbytes, count in self.layout.atoms:
            end, size = at + nbytes * count, nbytes // parts
            elements = np.ascontiguousarray(rows[:, at:end])
            if size in (1, 2, 4, 8):
                turned = elements.view(f"u{size}").byteswap().view(np.uint8)
            else:
                turned = elements.reshape(-1, size)[:, ::-1].reshape(elements.shape)
            out[:, at:end], at = turned, end
        return out.reshape(-1)

    @property
    def size(self) -> int:
        """Bytes of data in one item."""
        return self.layout.size

    @property
    def extent(self) -> int:
        """Bytes from one item to the next."""
        return self.layout.extent
