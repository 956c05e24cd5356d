"""`View`: which bytes of a file a rank sees, and in which order. Pure arithmetic.

displacement 16, filetype of 2 items every 4 (8-byte etype), seen as

    file    |16 bytes|A B . .|C D . .|E F . .|
    view    |A B C D E F|
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from unisono.mpi.layout import Layout


class Pieces(NamedTuple):
    """Runs of bytes of a file: where they begin, and how long they are (two arrays)."""

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


def merged(starts: Any, lengths: Any) -> Pieces:
    """Runs, of which one that continues the one before is part of it; none is empty."""
    kept = lengths > 0
    starts, lengths = starts[kept], lengths[kept]
    if len(starts) < 2:
        return Pieces(starts, lengths)
    first = np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]])
    where = np.flatnonzero(first)
    return Pieces(starts[where], np.add.reduceat(lengths, where))


class View:
    """The bytes from `displacement` on that items of `filetype` cover, one item after another."""

    def __init__(self, displacement: int, filetype: Layout) -> None:
        self._displacement, self._extent, self._size = displacement, filetype.extent, filetype.size
        parts = []
        for run in filetype.runs:
            at = np.array([run.offset], np.int64)
            for count, stride in run.dims:
                at = (at[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
            parts.append((at, np.full(len(at), run.length, np.int64)))
        none = np.zeros(0, np.int64)
        self._item = merged(
            np.concatenate([at for at, _ in parts] or [none]),
            np.concatenate([lengths for _, lengths in parts] or [none]),
        )
        self._before = np.concatenate([[0], np.cumsum(self._item.lengths)])

    def pieces(self, position: int, nbytes: int) -> Pieces:
        """Where `nbytes` of the view lie, from byte `position` of the view on."""
        if nbytes == 0 or self._size == 0:
            return Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64))
        first, last = position // self._size, (position + nbytes - 1) // self._size
        if len(self._item.starts) == 1 and self._extent == self._size:  # no holes
            return Pieces(np.array([self._in_file(first, position)]), np.array([nbytes]))
        items = np.arange(first, last + 1) * self._extent + self._displacement
        starts = (items[:, None] + self._item.starts).ravel()
        lengths = np.tile(self._item.lengths, len(items))
        ends = (np.arange(first, last + 1)[:, None] * self._size + self._before[1:]).ravel()
        early = np.clip(
            position - (ends - lengths), 0, lengths
        )  # of each run, before and behind what is asked
        late = np.clip(ends - (position + nbytes), 0, lengths)
        return merged(starts + early, lengths - early - late)

    def _in_file(self, item: int, position: int) -> int:
        within = position - item * self._size
        return self._displacement + item * self._extent + int(self._item.starts[0]) + within

    def byte_offset(self, position: int) -> int:
        """Where byte `position` of the view lies in the file."""
        if self._size == 0:
            return self._displacement
        return int(self.pieces(position, 1).starts[0])

    def length(self, file_nbytes: int) -> int:
        """How many bytes of the view lie within a file of that size."""
        rest = file_nbytes - self._displacement
        if rest <= 0 or self._size == 0:
            return 0
        if self._extent <= 0:
            return self._size
        items, rest = divmod(rest, self._extent)
        return items * self._size + int(np.clip(rest - self._item.starts, 0, self._item.lengths).sum())
