"""The spellings of a message: `x`, `[x, type]`, `[x, count, type]`, `[x, counts, displs, type]` and so on.

A `Block` is what one message carries: items of one type in a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unisono.mpi import constants
from unisono.mpi.buffers import BOTTOM, at_address, bytes_of, is_buffer
from unisono.mpi.datatype import Datatype
from unisono.mpi.errors import Exception, exact, of_size
from unisono.mpi.layout import Type, codes
from unisono.mpi.named_types import NAMED

_BYTE = NAMED["BYTE"]


class Block:
    """`count` items that begin at byte `start` of `raw`; without `raw`, at the address `start`."""

    __slots__ = ("count", "raw", "start", "type")

    def __init__(self, raw: Any, start: int, count: int, kind: Type) -> None:
        self.raw, self.start, self.count, self.type = raw, start, count, kind

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.count * self.type.layout.size

    @property
    def dense(self) -> bool:
        """Whether its bytes lie side by side."""
        return self.type.layout.dense

    def _memory(self) -> tuple[Any, int]:
        """(the bytes, where the first item begins in them)."""
        if self.raw is not None:
            return self.raw, self.start
        where = self.type.layout
        reach = (self.count - 1) * where.extent if self.count else 0
        low = self.start + where.true_lb + min(reach, 0)
        high = self.start + where.true_lb + where.true_extent + max(reach, 0)
        if self.nbytes == 0:
            return np.zeros(0, np.uint8), 0
        return at_address(low, high - low), self.start - low

    def view(self) -> Any:
        """Its bytes, which lie side by side, in place."""
        raw, start = self._memory()
        found = raw[start : start + self.nbytes]
        if found.size != self.nbytes:
            raise ValueError(
                f"message: buffer of {raw.size} bytes is too small for {self.nbytes} bytes from byte {start}"
            )
        return found

    def pack(self) -> Any:
        """Its bytes side by side: in place, or a copy."""
        if self.dense:
            return self.view()
        raw, start = self._memory()
        return self.type.layout.pack(raw, start, self.count)

    def room(self) -> Any:
        """Memory to receive its bytes into; `fill` puts them where they belong."""
        return self.view() if self.dense else np.empty(self.nbytes, np.uint8)

    def fill(self, packed: Any) -> None:
        """Put packed bytes where they belong; nothing to do for those of `view`."""
        if self.dense:
            target = self.view()[: packed.size]
            if target.__array_interface__["data"] != packed.__array_interface__["data"]:
                target[:] = packed
            return
        raw, start = self._memory()
        self.type.layout.unpack(packed, raw, start)

    def slice(self, first: int, count: int) -> Block:
        """`count` items from one on."""
        return Block(self.raw, self.start + first * self.type.layout.extent, count, self.type)

    def copied(self) -> Any:
        """Its bytes side by side, not in its own memory."""
        packed = self.pack()
        return packed.copy() if self.dense else packed


class EqualBlocks(Block):
    """Blocks of one size side by side: as one, or by rank. each: bytes of data in one."""

    __slots__ = ("each", "size")

    def __init__(self, raw: Any, start: int, count: int, kind: Type, size: int) -> None:
        super().__init__(raw, start, count * size, kind)
        self.size, self.each = size, count * kind.layout.size

    def __getitem__(self, rank: int) -> Block:
        count = self.count // self.size
        return self.slice(rank * count, count)

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(self.size))

    def twin(self) -> EqualBlocks:
        """Blocks of the same bytes, not in their own memory."""
        return EqualBlocks(self.copied(), 0, self.each, EMPTY.type, self.size)


class Blocks(list[Block]):
    """A block for each of several ranks."""

    @property
    def dense(self) -> bool:
        """Whether the bytes of each lie side by side."""
        return False not in [one.type.layout.dense for one in self]

    def pack(self) -> list[Any]:
        """See `Block.pack`, of each."""
        return [one.pack() for one in self]

    def room(self) -> list[Any]:
        """See `Block.room`, of each."""
        return [one.room() for one in self]

    def fill(self, rooms: list[Any]) -> None:
        """See `Block.fill`, of each."""
        for one, packed in zip(self, rooms, strict=True):
            one.fill(packed)

    def twin(self) -> Blocks:
        """See `EqualBlocks.twin`."""
        return Blocks([byte_block(one.copied()) for one in self])


def byte_block(raw: Any, start: int = 0, nbytes: int | None = None) -> Block:
    """Bytes as a block."""
    return Block(raw, start, raw.size if nbytes is None else nbytes, EMPTY.type)


EMPTY = Block(np.zeros(0, np.uint8), 0, 0, _BYTE._state)


def _datatype(given: Any) -> Datatype:
    if isinstance(given, Datatype):
        return given
    if isinstance(given, str) and given in codes:
        return codes[given]
    if isinstance(given, str) and given[:1] == ">":
        raise BufferError(f"format string {given!r} with non-native byte order")
    if isinstance(given, str):
        raise KeyError(f"cannot map {given!r} to MPI datatype")
    raise TypeError(f"message: expecting a datatype, got {type(given).__name__}")


def _split(message: Any, pairs: Any) -> tuple[Any, Any, Any, Any]:
    """(buffer, count or counts, displacement or displacements, type) as they were given."""
    if not isinstance(message, list | tuple):
        if is_buffer(message):
            return message, None, None, None
        raise TypeError("message: expecting buffer or list/tuple")
    if not 2 <= len(message) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    buf, count, displ, kind = message[0], None, None, None
    if len(message) == 4:
        _, count, displ, kind = message
        return buf, count, displ, kind
    if len(message) == 3:
        _, count, kind = message
    elif isinstance(message[1], Datatype | str):
        kind = message[1]
    else:
        count = message[1]
    if isinstance(count, pairs):
        if len(count) != 2:
            raise ValueError("message: expecting (count, displacement)")
        count, displ = count
    return buf, count, displ, kind


def _basic(buf: Any, kind: Any, writable: bool) -> tuple[Any, Datatype]:
    """(bytes or None for BOTTOM, type)."""
    if buf is None or buf is BOTTOM:
        return None, _datatype(kind)
    raw, code = bytes_of(buf, writable)
    return raw, _datatype(code if kind is None else kind)


def _infer(kind: Datatype, length: int) -> int:
    """How many items fill `length` bytes."""
    if not kind:
        raise ValueError("message: cannot infer count, datatype is null")
    extent = kind.extent
    if extent <= 0:
        raise ValueError(f"message: cannot infer count, datatype extent {extent}")
    if length % extent:
        raise ValueError(
            f"message: cannot infer count, {length} bytes are no multiple of the datatype extent {extent}"
        )
    return length // extent


def simple(message: Any, *, writable: bool, blocks: int = 0) -> Block:
    """The items of a message. blocks: of how many equal ones; the Block is the first.

    Raises:
        ValueError, TypeError, KeyError, BufferError: it is spelled wrong.  Exception: its type is null.
    """
    if isinstance(message, Block):
        return message
    buf, count, displ, kind = _split(message, (list, tuple))
    raw, datatype = _basic(buf, kind, writable)
    start, length = 0, 0 if raw is None else raw.size
    if displ is not None:
        shift = exact(displ, "message: displacement")
        if shift < 0:
            raise ValueError(f"message: negative displacement {shift}")
        if shift > 0:
            start = shift * _positive_extent(datatype)
            if start > length:
                raise ValueError(f"message: displacement {shift} out of bounds")
            length -= start
    if count is not None:
        number = exact(count, "message: count")
        if number < 0:
            raise ValueError(f"message: negative count {number}")
        if number > 0 and buf is None:
            raise ValueError(f"message: buffer is None but count is {number}")
    else:
        number = _infer(datatype, length) if length else 0
        if blocks > 1 and number % blocks:
            raise ValueError(f"message: cannot infer count, {number} entries are no {blocks} equal blocks")
        number //= max(blocks, 1)
    if not datatype and not number:
        return EMPTY
    return Block(raw, start, number, datatype._alive())


def _positive_extent(kind: Datatype) -> int:
    if not kind:
        raise ValueError("message: cannot handle displacement, datatype is null")
    if kind.extent <= 0:
        raise ValueError(f"message: cannot handle displacement, datatype extent {kind.extent}")
    return kind.extent


def equal(message: Any, size: int, *, writable: bool) -> EqualBlocks:
    """`size` blocks of one size, side by side."""
    first = simple(message, writable=writable, blocks=size)
    return EqualBlocks(first.raw, first.start, first.count, first.type, size)


def repeated(message: Any, size: int, *, writable: bool) -> Blocks:
    """The same items for every rank."""
    return Blocks([simple(message, writable=writable)] * size)


def vector(message: Any, size: int, *, writable: bool) -> Blocks:
    """`size` blocks, of which each has a count and a displacement in items."""
    buf, counts, displs, kind = _split(message, tuple)
    raw, datatype = _basic(buf, kind, writable)
    if counts is None:
        total = _infer(datatype, raw.size) if raw is not None and raw.size else 0
        counts = [total // size + (total % size > number) for number in range(size)]
    elif _is_number(counts):
        counts = [exact(counts, "message: count")] * size
    else:
        counts = _listed(counts, size)
    if displs is None:
        displs = [sum(counts[:number]) for number in range(size)] if size else []
    elif _is_number(displs):
        displs = [exact(displs, "message: displacement") * number for number in range(size)]
    else:
        displs = _listed(displs, size)
    if any(one < 0 for one in counts):
        raise Exception(constants.ERR_COUNT, f"counts are {counts}")
    if not datatype and not any(counts):
        return Blocks([EMPTY] * size)
    state = datatype._alive()
    return Blocks([Block(raw, at * state.extent, n, state) for n, at in zip(counts, displs, strict=True)])


def by_types(message: Any, size: int, *, writable: bool) -> Blocks:
    """`size` blocks, of which each has a count, a displacement in bytes, and a type."""
    if len(message) not in (2, 3, 4):
        raise ValueError("message: expecting 2 to 4 items")
    buf, *rest, types = message
    counts, displs = rest if len(rest) == 2 else rest[0] if rest else (None, None)
    if buf is BOTTOM:
        if counts is None or displs is None:
            raise ValueError("message: BOTTOM requires counts and displs")
        raw = None
    else:
        raw = bytes_of(buf, writable)[0]
    counts = [1] * size if counts is None else _listed(counts, size)
    displs = [0] * size if displs is None else _listed(displs, size)
    states = [one._alive() for one in _types(types, size)]
    return Blocks([Block(raw, at, n, one) for n, at, one in zip(counts, displs, states, strict=True)])


def _types(types: Any, size: int) -> list[Datatype]:
    return of_size([_datatype(one) for one in types], size)  # type: ignore[no-any-return]


def _is_number(x: Any) -> bool:
    return hasattr(x, "__index__") and np.ndim(x) == 0


def _listed(numbers: Sequence[int], size: int) -> list[int]:
    found: list[int] = of_size([exact(one, "message: counts and displacements") for one in numbers], size)
    return found


SIZES = {equal: "of one size", vector: "of any sizes", by_types: "of any sizes and types"}
"""What each of these makes of a message, in words."""
