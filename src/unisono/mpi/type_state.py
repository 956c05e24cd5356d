"""`Type`: the state of a datatype, and the tables of the named ones."""

from __future__ import annotations

from typing import Any

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

    @property
    def size(self) -> int:
        """Bytes of data in one item."""
        return self.layout.size

    @property
    def extent(self) -> int:
        """Bytes from one item to the next."""
        return self.layout.extent
