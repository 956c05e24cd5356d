"""From one layout to another by the cheapest chain of moves, and back in backward.

A layout has one placement per mesh axis, DTensor's: Replicate, Shard(dim), Partial(sum). Where several axes
cut one dim, the first axis is the major one. A move changes some axes at once. It takes away the minor axes
of a dim, or adds minor axes to one: anything else would tear blocks apart. Dijkstra's search finds the
cheapest chain.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from unisono.torch_internals import version_names

from .cost import LayoutTransform, Link, TransformRecord, note

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from .grid import RankGrid

Layout = tuple[Any, ...]  # one Placement per axis
WHOLE, SUM = Replicate(), Partial()


class TransformPath(NamedTuple):
    """A chain of moves and its cost: seconds, bytes received by a rank."""

    moves: tuple[LayoutTransform, ...]
    seconds: float
    nbytes: float


@functools.lru_cache(maxsize=4096)
def transform_path(
    start: Layout, goal: Layout, shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...], link: Link
) -> TransformPath:
    """Find the cheapest way from `start` to `goal`.

    Args:
        shape: of the whole tensor.    sizes: of the mesh axes.
    Example: 4 ranks as 2 x 2, (Shard(0), Shard(0)) -> (Replicate, Replicate): one all_gather over both axes.
    """
    whole = math.prod(shape) * itemsize
    order = itertools.count()
    queue: list[tuple[float, float, int, Layout, tuple[LayoutTransform, ...]]] = [
        (0.0, 0.0, next(order), start, ())
    ]
    settled: set[Layout] = set()
    while queue:
        seconds, nbytes, _, layout, moves = heapq.heappop(queue)
        if layout == goal:
            return TransformPath(moves, seconds, nbytes)
        if layout in settled:
            continue
        settled.add(layout)
        part = whole / math.prod(size for size, p in zip(sizes, layout, strict=True) if isinstance(p, Shard))
        for move, following in _moves(layout, shape, sizes):
            if following not in settled:
                ranks = math.prod(sizes[axis] for axis in move.axes)
                cost = seconds + link.seconds(move.kind, ranks, part)
                received = nbytes + link.received(move.kind, ranks, part)
                heapq.heappush(queue, (cost, received, next(order), following, (*moves, move)))
    raise ValueError(f"there is no way from {start} to {goal} for shape {shape} on axes {sizes}")


def _moves(
    layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[LayoutTransform, Layout]]:
    """Every move from `layout`, and the layout after it."""
    axes = range(len(sizes))
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(axes, count):
            before = {layout[axis] for axis in chosen}
            if len(before) != 1:
                continue
            (source,) = before
            if isinstance(source, Shard) and not _minor(layout, chosen, source.dim):
                continue
            for target in [WHOLE, *map(Shard, range(len(shape)))]:
                kind = _kind(source, target)
                following = tuple(target if axis in chosen else layout[axis] for axis in axes)
                if kind and (
                    not isinstance(target, Shard) or _fits(following, chosen, target.dim, shape, sizes)
                ):
                    yield LayoutTransform(kind, chosen, _dim(source), _dim(target)), following


def _kind(source: Placement, target: Placement) -> str | None:
    if isinstance(source, Partial):
        return "all_reduce" if target == WHOLE else "reduce_scatter"
    if isinstance(source, Shard):
        if target == source:
            return None
        return "all_gather" if target == WHOLE else "all_to_all"
    return None if target == WHOLE else "slice"


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _minor(layout: Layout, chosen: Sequence[int], dim: int) -> bool:
    """Whether `chosen` are the last of the axes that cut `dim`."""
    return all(axis in chosen or axis < min(chosen) for axis, p in enumerate(layout) if p == Shard(dim))


def _fits(
    layout: Layout, chosen: Sequence[int], dim: int, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    parts = math.prod(size for size, p in zip(sizes, layout, strict=True) if p == Shard(dim))
    return shape[dim] % parts == 0 and _minor(layout, chosen, dim)


# ---- the moves ----


def redistribute(value: DTensor, goal: Layout, grid: RankGrid, link: Link, where: str) -> DTensor:
    """Bring `value` into the layout `goal`; differentiable. Gradients take their own cheapest route back."""
    result: DTensor = _Redistribute.apply(value, goal, grid, link, where)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor, goal: Layout, grid: RankGrid, link: Link, where: str) -> DTensor:
        ctx.back = tuple(WHOLE if isinstance(p, Partial) else p for p in value.placements)
        ctx.how = grid, link, f"{where}, backward"
        return _follow(value, goal, grid, link, where)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:  # type: ignore[override]
        return _follow(grad, ctx.back, *ctx.how), None, None, None, None


def _follow(value: DTensor, goal: Layout, grid: RankGrid, link: Link, where: str) -> DTensor:
    shape, here = tuple(value.shape), tuple(value.placements)
    found = transform_path(here, goal, shape, value.element_size(), grid.sizes, link)
    local = value.to_local().detach()
    for move in found.moves:
        ranks, nbytes = grid.ranks(move.axes), local.nbytes
        start = time.perf_counter()
        with record_function(f"up::{where}|{move.kind}"):
            local = _move(local, move, grid)
        note(
            TransformRecord(
                where, move, ranks, str(here), str(goal), link.received(move.kind, ranks, nbytes),
                link.seconds(move.kind, ranks, nbytes), time.perf_counter() - start,
            )
        )  # fmt: skip
    return DTensor.from_local(
        local, grid.mesh, goal, run_check=False, shape=value.shape, stride=_stride(shape)
    )


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _move(local: Tensor, move: LayoutTransform, grid: RankGrid) -> Tensor:
    ranks = grid.ranks(move.axes)
    if move.kind == "slice":
        assert move.target is not None
        return local.chunk(ranks, move.target)[grid.place(move.axes)].contiguous()
    group = grid.group(move.axes)
    if move.kind == "all_reduce":
        local = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(local, group=group)
        return local
    if move.kind == "all_gather":
        parts = local.new_empty(ranks, *local.shape)
        version_names.all_gather_single(parts, local.contiguous(), group=group)
        return _joined(parts, move.source)
    assert move.target is not None
    cut = torch.stack(local.chunk(ranks, move.target))
    if move.kind == "reduce_scatter":
        part = torch.empty_like(cut[0])
        version_names.reduce_scatter_single(part, cut, group=group)
        return part
    parts = torch.empty_like(cut)
    dist.all_to_all_single(parts, cut, group=group)
    return _joined(parts, move.source)


def _joined(parts: Tensor, dim: int | None) -> Tensor:
    """[ranks, *local] -> parts one after the other along `dim`."""
    assert dim is not None
    return torch.cat(parts.unbind(0), dim) if dim else parts.flatten(0, 1)
