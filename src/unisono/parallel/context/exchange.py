"""What the ranks of a context group exchange beside attention. Each has its exact transpose in backward.

All ranks compute the same loss, each with 1/n of its gradient, so the gradient of a value that every rank has
is the sum over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from unisono.parallel import tensor_moves
from unisono.parallel.tensor_moves import TensorAxis, exchanged

from .layout import PositionSpan, SequenceDim


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
