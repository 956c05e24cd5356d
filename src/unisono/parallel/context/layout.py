"""Where a sequence lies in a tensor, which of its positions each rank has, and how values go elsewhere.

The sequence of an input is cut into 2n chunks; rank r of n has chunks r and 2n-1-r, so that causal attention
is the same work on each (zigzag). Source: Dubey et al., The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.2.

    n = 2, 8 positions:   0 1 | 2 3 | 4 5 | 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5

What ranks exchange beside attention has its exact transpose in backward. All ranks compute the same loss,
each with 1/n of its gradient, so the gradient of a value that every rank has is the sum over them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from unisono.parallel import tensor_moves
from unisono.parallel.tensor_moves import TensorAxis, exchanged


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


def take(value: Tensor, place: SequenceDim, rank: int) -> Tensor:
    """This rank's positions of a value that every rank has."""
    outer, size = place.outer, place.span.size
    apart = value.unflatten(place.dim, (outer, size, value.shape[place.dim] // (outer * size)))
    parts = [apart.narrow(place.dim + 1, begin, end - begin) for begin, end in place.span.runs(rank)]
    mine = torch.cat(parts, place.dim + 1) if parts else apart.narrow(place.dim + 1, 0, 0)
    return mine.flatten(place.dim, place.dim + 2)


def move(
    value: Tensor,
    shape: Sequence[int],
    place: SequenceDim,
    span: PositionSpan,
    ranks: TensorAxis,
    label: str,
) -> Tensor:
    """Exchange rows: the parts of `place.span` become those of `span`, which has as many positions."""
    run, back = (
        partial(_rows, came=came, goes=goes, ranks=ranks, label=label)
        for came, goes in ((place.span, span), (span, place.span))
    )
    moved = exchanged(_rows_first(value, shape, place), run, back)
    return moved.movedim(0, place.dim + 1).flatten(place.dim, place.dim + 2)


def gathered(
    value: Tensor, shape: Sequence[int], place: SequenceDim, ranks: TensorAxis, label: str
) -> Tensor:
    """All positions of a value, on every rank. Its gradient is the sum of what the ranks do with them."""

    def back(grad: Tensor) -> Tensor:
        return take(tensor_moves.move(grad, "sum", 0, ranks, label), place, ranks.place)

    return exchanged(value, partial(whole, shape=shape, place=place, ranks=ranks, label=label), back)


@torch.no_grad()
def whole(value: Tensor, shape: Sequence[int], place: SequenceDim, ranks: TensorAxis, label: str) -> Tensor:
    """All positions of a value, on every rank. It has no gradient."""
    span, mine = place.span, _rows_first(value, shape, place)
    most = max(span.count(rank) for rank in range(ranks.parts))
    padded = mine.new_zeros(most, *mine.shape[1:])
    padded[: len(mine)] = mine
    every = [torch.empty_like(padded) for _ in range(ranks.parts)]
    with record_function(label):
        dist.all_gather(every, padded, group=ranks.group)
    made = mine.new_empty(span.size, *mine.shape[1:])
    for rank, part in enumerate(every):
        made[span.positions(rank)] = part[: span.count(rank)]
    return made.movedim(0, place.dim + 1).flatten(place.dim, place.dim + 2)


def _rows_first(value: Tensor, shape: Sequence[int], place: SequenceDim) -> Tensor:
    inner = shape[place.dim] // (place.outer * place.span.size)
    apart = value.unflatten(place.dim, (place.outer, value.shape[place.dim] // (place.outer * inner), inner))
    first: Tensor = apart.movedim(place.dim + 1, 0)
    return first


def _rows(value: Tensor, came: PositionSpan, goes: PositionSpan, ranks: TensorAxis, label: str) -> Tensor:
    gives, given, gets, got = _routes(came, goes, ranks.place)
    give, get = torch.from_numpy(gives), torch.from_numpy(gets)
    row = math.prod(value.shape[1:])
    sent = value[give].contiguous()
    received = value.new_empty(len(get), *value.shape[1:])
    with record_function(label):
        sizes = [count * row for count in got], [count * row for count in given]
        dist.all_to_all_single(received.view(-1), sent.view(-1), *sizes, group=ranks.group)
    made = torch.empty_like(received)
    made[get] = received
    return made


@lru_cache(maxsize=256)
def _routes(came: PositionSpan, goes: PositionSpan, rank: int) -> tuple[Any, list[int], Any, list[int]]:
    """The rows that a rank gives, in the order of the ranks that get them, with counts; and those it gets.

    Rows are arrays of NumPy: a tensor that is made where a model runs without values has none afterwards.
    """
    give = [_both(came, rank, goes, other) for other in range(came.ranks)]
    get = [_both(goes, rank, came, other) for other in range(came.ranks)]
    rows = [np.array([at for each in route for at in each], dtype=np.int64) for route in (give, get)]
    return rows[0], [*map(len, give)], rows[1], [*map(len, get)]


def _both(mine: PositionSpan, rank: int, theirs: PositionSpan, other: int) -> list[int]:
    there = set(theirs.positions(other))
    return [at for at, position in enumerate(mine.positions(rank)) if position in there]
