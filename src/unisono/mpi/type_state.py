"""`Type`: the state of a datatype, and the tables of the named ones."""

from __future__ import annotations

from itertools import accumulate
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
        parts = 2 if self.dtype is not None and self.dtype.kind == "c" else 1
        atoms = [(nbytes // parts, nbytes * count) for nbytes, count in self.layout.atoms]
        if len(atoms) == 1 or not packed.size:
            return _turned(packed, atoms[0][0]) if packed.size else packed
        rows = packed.reshape(-1, self.size)
        ends = list(accumulate(nbytes for _, nbytes in atoms))
        parts_of_items = zip(np.split(rows, ends[:-1], axis=1), atoms, strict=True)
        return np.hstack([_turned(np.ascontiguousarray(x), n) for x, (n, _) in parts_of_items]).reshape(-1)

    @property
    def size(self) -> int:
        """Bytes of data in one item."""
        return self.layout.size

    @property
    def extent(self) -> int:
        """Bytes from one item to the next."""
        return self.layout.extent


def _turned(raw: Any, nbytes: int) -> Any:
    """Numbers of `nbytes` with their bytes in the other order."""
    if nbytes in (1, 2, 4, 8):
        return raw.view(f"u{nbytes}").byteswap().view(np.uint8)
    return np.ascontiguousarray(raw.reshape(-1, nbytes)[:, ::-1]).reshape(raw.shape)
