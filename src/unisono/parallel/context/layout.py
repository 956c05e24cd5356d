"""Where a sequence lies in a tensor, and which of its positions each rank has.

The sequence of an input is cut into 2n chunks; rank r of n has chunks r and 2n-1-r, so that causal attention
is the same work on each (zigzag). Source: Dubey et al., The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.2.

    n = 2, 8 positions:   0 1 | 2 3 | 4 5 | 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache


class LayoutError(Exception):
    """The text says why a cut sequence cannot stay cut."""


@dataclass(frozen=True)
class PositionSpan:
    """Consecutive positions of a sequence. Position p of a value is number `first + p` of the input's.

    A number before the input's first one belongs to the rank of the first chunk, one after its last to that
    of the last chunk.

    Args:
        length: of the input's sequence.
        ranks: that share it.
    Example: the labels tokens[:, 1:] of 9 tokens are PositionSpan(9, 1, 8, ranks).
    """

    length: int
    first: int
    size: int
    ranks: int

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The positions of a rank, as bounds [begin, end) in order."""
        return _runs(self, rank)

    def count(self, rank: int) -> int:
        """How many positions a rank has."""
        return sum(end - begin for begin, end in self.runs(rank))

    def positions(self, rank: int) -> list[int]:
        """The positions of a rank, in order."""
        return [position for begin, end in self.runs(rank) for position in range(begin, end)]

    def owner(self, position: int) -> int:
        """The rank that has a position."""
        return next(
            rank for rank in range(self.ranks) for begin, end in self.runs(rank) if begin <= position < end
        )

    def part(self, begin: int, end: int) -> PositionSpan:
        """Positions [begin, end). `begin` may be negative, and `end` beyond the size: these are padding."""
        return replace(self, first=self.first + begin, size=end - begin)


@lru_cache(maxsize=4096)
def _runs(span: PositionSpan, rank: int) -> tuple[tuple[int, int], ...]:
    chunks = 2 * span.ranks
    bounds = [span.length * chunk // chunks - span.first for chunk in range(chunks + 1)]
    bounds[0], bounds[-1] = min(bounds[0], 0), max(bounds[-1], span.size)
    found: list[tuple[int, int]] = []
    for chunk in (rank, chunks - 1 - rank):
        begin, end = (min(max(bound, 0), span.size) for bound in bounds[chunk : chunk + 2])
        if begin == end:
            continue
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)


@dataclass(frozen=True)
class SequenceDim:
    """The sequence in a tensor: dim `dim` has outer x sequence x inner elements, the major factor first.

    Example: [rows * time, words] is SequenceDim(0, rows, span of time).
    """

    dim: int
    outer: int
    span: PositionSpan

    def at(self, dim: int) -> SequenceDim:
        """The same in another dim."""
        return replace(self, dim=dim)


def local_shape(shape: Sequence[int], place: SequenceDim | None, rank: int) -> list[int]:
    """The shape of a rank's part of a value."""
    found = list(shape)
    if place is not None:
        found[place.dim] = found[place.dim] // place.span.size * place.span.count(rank)
    return found


def viewed(shape: Sequence[int], place: SequenceDim, goal: Sequence[int]) -> SequenceDim:
    """The place after a view to shape `goal`."""
    before, size = math.prod(shape[: place.dim]) * place.outer, place.span.size
    for dim, (prefix, length) in enumerate(
        zip(itertools.accumulate([1, *goal], lambda a, b: a * b), goal, strict=False)
    ):
        if prefix and before % prefix == 0:
            block = before // prefix * size
            if block and block <= length and length % block == 0:
                return SequenceDim(dim, before // prefix, place.span)
    raise LayoutError(f"it splits the sequence of {size} positions, from {list(shape)} to {list(goal)}")
