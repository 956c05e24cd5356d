"""Cuts of arrays as boxes, and what of one cut lies in another. Pure arithmetic.

A box is where a piece begins in its array, and its shape. An array of [4, 6] whose columns two ranks hold:

    rank 0: Box((0, 0), (4, 3))     rank 1: Box((0, 3), (4, 3))

Who wants rows 0 and 1 takes Box((0, 0), (2, 3)) from rank 0 and Box((0, 3), (2, 3)) from rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of an array: its first index, and its shape."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements; 1 without dimensions."""
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[Any, ...]:
        """The indices of this box in an array that has the elements of `outer`: of a view, never a number."""
        starts = [mine - its for mine, its in zip(self.offset, outer.offset, strict=True)]
        return (*(slice(a, a + length) for a, length in zip(starts, self.shape, strict=True)), ...)


class PieceTransfer(NamedTuple):
    """A part of piece number `piece` of `rank` that goes to wanted piece number `wanted`."""

    rank: int
    piece: int
    wanted: int
    box: Box


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that are in both; None: there are none. Example: rows 0:4 and 3:9 -> rows 3:4"""
    offset = tuple(map(max, one.offset, other.offset))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def part(length: int, parts: int, place: int) -> tuple[int, int]:
    """The first index and the number of those of one of `parts`, as `torch.chunk` cuts: 5, 3 -> 2, 2, 1."""
    each = -(-length // parts)
    start = min(length, place * each)
    return start, min(length, start + each) - start


def split(box: Box, parts: int) -> list[Box]:
    """Cut a box into at most `parts`, along its first dimension of more than one element."""
    dim = next((dim for dim, length in enumerate(box.shape) if length > 1), None)
    if dim is None or parts < 2:
        return [box]
    found = []
    for place in range(parts):
        start, length = part(box.shape[dim], parts, place)
        if length:
            offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
            found.append(Box(offset, (*box.shape[:dim], length, *box.shape[dim + 1 :])))
    return found


def gap(shape: Shape, boxes: Sequence[Box]) -> str:
    """Why these pieces are no cut of an array of `shape`; "": each element is in exactly one of them.

    Pieces that are equal count once: they are copies.
    """
    apart = list(dict.fromkeys(boxes))
    for box in apart:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            return f"a piece has {len(box.shape)} dimensions, the array {len(shape)}"
        if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(*box, shape, strict=True)):
            return f"the piece of {box.shape} at {box.offset} reaches beyond the array of {shape}"
    for one, other in combinations([box for box in apart if box.numel], 2):
        if overlap(one, other):
            return f"the pieces of {one.shape} at {one.offset} and {other.shape} at {other.offset} overlap"
    covered = sum(box.numel for box in apart)
    return "" if covered == math.prod(shape) else f"the pieces have {covered} of {math.prod(shape)} elements"


def transfers(
    held: Mapping[Box, Sequence[tuple[int, int]]], wanted: Box, number: int, near: frozenset[int]
) -> Iterator[PieceTransfer]:
    """What fills `wanted`: from which piece of which rank. Ranks that hold copies give a share each.

    Args:
        held: a cut of the array -> who has each box, as (rank, number of the piece there).
        number: of `wanted`, for the `PieceTransfer`.
        near: ranks that give all, where they can.
    """
    for box, holders in held.items():
        common = overlap(box, wanted)
        if common is None:
            continue
        chosen = [one for one in holders if one[0] in near] or list(holders)
        for share, (rank, piece) in zip(split(common, len(chosen)), chosen, strict=False):
            yield PieceTransfer(rank, piece, number, share)
