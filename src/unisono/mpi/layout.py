"""Where the bytes of a datatype lie: runs of bytes, repeated at constant strides; and `Type`, its state.

    vector(3 blocks of 2 doubles, every 4)    one run: 16 bytes, 3 times, every 32

An item is packed run by run; items lie `extent` bytes apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from unisono.mpi.handle import State

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MANY_RUNS = 16
"""An item of more runs is packed by an array of byte offsets."""


class Run(NamedTuple):
    """`length` bytes, repeated: dims are (count, stride in bytes), the outermost first."""

    offset: int
    dims: tuple[tuple[int, int], ...]
    length: int

    def span(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        reach = [(count - 1) * stride for count, stride in self.dims]
        first = self.offset + sum(one for one in reach if one < 0)
        return first, self.offset + sum(one for one in reach if one > 0) + self.length

    def nbytes(self) -> int:
        """The number of bytes."""
        total = self.length
        for count, _ in self.dims:
            total *= count
        return total


class Pieces(NamedTuple):
    """Bytes side by side, several times: where they begin, and how many they are (two arrays)."""

    starts: Any
    lengths: Any

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return int(self.lengths.sum())

    def span(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        if not len(self.starts):
            return 0, 0
        return int(self.starts.min()), int((self.starts + self.lengths).max())

    def places(self, origin: int = 0) -> Any:
        """Where each byte is, counted from byte `origin`."""
        ends = np.cumsum(self.lengths)
        shift = np.repeat(self.starts - origin - (ends - self.lengths), self.lengths)
        return shift + np.arange(len(shift))


class Layout:
    """The runs of an item, its bounds, and its elements.

    atoms: (bytes, how many) of its elements, in order.  align: of the largest element.
    """

    def __init__(
        self, runs: tuple[Run, ...], lb: int, extent: int, atoms: tuple[tuple[int, int], ...], align: int = 1
    ) -> None:
        self.runs, self.lb, self.extent, self.atoms, self.align = runs, lb, extent, atoms, align
        self.size = sum(run.nbytes() for run in runs)
        spans = [run.span() for run in runs]
        self.true_lb = min((first for first, _ in spans), default=0)
        self.true_extent = max((end for _, end in spans), default=0) - self.true_lb
        self.dense = extent == self.size and lb == 0 and (not runs or runs == (Run(0, (), extent),))

    def resized(self, lb: int, extent: int) -> Layout:
        """The same bytes with other bounds."""
        return Layout(self.runs, lb, extent, self.atoms, self.align)

    @cached_property
    def pieces(self) -> Pieces:
        """The bytes of an item, in the order of packing."""
        starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for run in self.runs:
            at = np.array([run.offset])
            for count, stride in run.dims:
                at = (at[:, None] + np.arange(count) * stride).ravel()
            starts.append(at)
            lengths.append(np.full(len(at), run.length))
        return _touching(np.concatenate(starts), np.concatenate(lengths))

    @cached_property
    def offsets(self) -> Any:
        """The offset of each byte of an item, in the order of packing."""
        return self.pieces.places()

    def within(self, position: int, nbytes: int) -> Pieces:
        """Where `nbytes` packed bytes of items lie, from packed byte `position` on; item 0 begins at 0.

        Example: items of bytes 0 and 2, 4 apart: packed bytes 1 to 3 lie at 2, 4 and 6.
        """
        if nbytes == 0 or self.size == 0:
            return Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64))
        first, last = position // self.size, (position + nbytes - 1) // self.size
        if len(self.pieces.starts) == 1 and self.extent == self.size:  # no holes
            return Pieces(self.pieces.starts + position, np.array([nbytes]))
        items = np.arange(first, last + 1)
        starts = (items[:, None] * self.extent + self.pieces.starts).ravel()
        lengths = np.tile(self.pieces.lengths, len(items))
        ends = (items[:, None] * self.size + np.cumsum(self.pieces.lengths)).ravel()
        early = np.clip(position - (ends - lengths), 0, lengths)  # of each piece, before what is asked
        late = np.clip(ends - (position + nbytes), 0, lengths)  # and behind it
        return _touching(starts + early, lengths - early - late)

    # ---- packing

    def pack(self, raw: Any, start: int, count: int) -> Any:
        """`count` items that begin at byte `start` of `raw`, as new bytes."""
        out = np.empty(count * self.size, np.uint8)
        if len(self.runs) > _MANY_RUNS:
            out[:] = raw[self._places(raw, start, count)]
            return out
        for inside, packed in self._pairs(raw, start, count, out):
            packed[...] = inside
        return out

    def unpack(self, packed: Any, raw: Any, start: int) -> None:
        """Put packed bytes, perhaps less than whole items, to items that begin at byte `start` of `raw`."""
        whole, rest = divmod(packed.size, self.size) if self.size else (0, 0)
        if rest:
            places = start + whole * self.extent + self.offsets[:rest]
            raw[_inside(places, raw)] = packed[whole * self.size :]
        if len(self.runs) > _MANY_RUNS:
            raw[self._places(raw, start, whole)] = packed[: whole * self.size]
            return
        for inside, part in self._pairs(raw, start, whole, packed):
            inside[...] = part

    def _places(self, raw: Any, start: int, count: int) -> Any:
        items = start + np.arange(count) * self.extent
        return _inside((items[:, None] + self.offsets).ravel(), raw)

    def _pairs(self, raw: Any, start: int, count: int, packed: Any) -> Iterator[tuple[Any, Any]]:
        """For each run: its bytes in memory, and where they are packed."""
        at = 0
        for run in self.runs if count else ():
            word = _WORDS.get(run.length)
            inner, steps = ((), ()) if word else ((run.length,), (1,))
            shape = (count, *(n for n, _ in run.dims), *inner)
            strides = (self.extent, *(stride for _, stride in run.dims), *steps)
            tight, step = [], run.length
            for n, _ in reversed(run.dims):
                tight.append(step)
                step *= n
            kind = word or np.uint8
            yield (
                _strided(shape, kind, raw, start + run.offset, strides),
                _strided(shape, kind, packed, at, (self.size, *reversed(tight), *steps)),
            )
            at += step


def _strided(shape: Any, kind: Any, raw: Any, offset: int, strides: Any) -> Any:
    try:
        return np.ndarray(shape, kind, raw, offset, strides)
    except (TypeError, ValueError):
        raise _outside(raw) from None


def _inside(places: Any, raw: Any) -> Any:
    if places.size and (places.min() < 0 or places.max() >= raw.size):
        raise _outside(raw)
    return places


def _outside(raw: Any) -> ValueError:
    return ValueError(f"message: the items reach beyond the buffer of {raw.size} bytes")


def basic(nbytes: int, align: int) -> Layout:
    """One element."""
    return Layout((Run(0, (), nbytes),) if nbytes else (), 0, nbytes, ((nbytes, 1),), align)


def repeated(one: Layout, count: int, stride: int) -> Layout:
    """`count` items, `stride` bytes apart."""
    if count == 0:
        return Layout((), 0, 0, ())
    if count == 1:
        return one
    if len(one.runs) == 1:
        (run,) = one.runs
        merges = not run.dims and run.length == stride
        runs: tuple[Run, ...] = (
            Run(run.offset, (), run.length * count)
            if merges
            else Run(run.offset, ((count, stride), *run.dims), run.length),
        )
    else:
        runs = _merged(run._replace(offset=run.offset + i * stride) for i in range(count) for run in one.runs)
    reach = (count - 1) * stride
    lb, ub = one.lb + min(reach, 0), one.lb + one.extent + max(reach, 0)
    return Layout(runs, lb, ub - lb, _repeat(one.atoms, count), one.align)


def joined(parts: Iterable[tuple[int, Layout]]) -> Layout:
    """Several layouts, each shifted by bytes."""
    found = [(shift, one) for shift, one in parts if one.runs or one.extent]
    if not found:
        return Layout((), 0, 0, ())
    lb = min(shift + one.lb for shift, one in found)
    ub = max(shift + one.lb + one.extent for shift, one in found)
    runs = _merged(run._replace(offset=run.offset + shift) for shift, one in found for run in one.runs)
    atoms: list[tuple[int, int]] = []
    for _, one in found:
        for nbytes, count in one.atoms:
            if atoms and atoms[-1][0] == nbytes:
                atoms[-1] = (nbytes, atoms[-1][1] + count)
            else:
                atoms.append((nbytes, count))
    return Layout(runs, lb, ub - lb, tuple(atoms), max(one.align for _, one in found))


def padded(one: Layout) -> Layout:
    """With an extent that keeps the next item aligned, as a struct of C."""
    return one.resized(one.lb, -(-one.extent // one.align) * one.align)


def _repeat(atoms: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    if len(atoms) == 1:
        return ((atoms[0][0], atoms[0][1] * count),)
    return atoms * count


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs, of which one that continues the one before is part of it."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last and not last.dims and not run.dims and last.offset + last.length == run.offset:
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    return tuple(found)


def _touching(starts: Any, lengths: Any) -> Pieces:
    """Pieces, of which one that continues the one before is part of it; none is empty."""
    kept = lengths > 0
    starts, lengths = starts[kept], lengths[kept]
    if len(starts) < 2:
        return Pieces(starts, lengths)
    where = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
    return Pieces(starts[where], np.add.reduceat(lengths, where))


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
