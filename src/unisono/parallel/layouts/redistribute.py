"""From one layout to another by the cheapest chain of moves, and back in backward; the record of the moves.

A layout has one placement of DTensor's per mesh axis: Replicate, Shard(dim), Partial(sum). Where several axes
cut one dim, the first axis is the major one. A move changes some axes at once. It takes away the minor axes
of a dim, or adds minor axes to one: anything else would tear blocks apart. Dijkstra's search finds the
cheapest chain. (DTensor's own `redistribute` changes one axis at a time, and on CPU it gathers a value in
order to cut it along another dim.)

The mesh has prime sizes: 8 ranks are 2 x 2 x 2, 6 are 2 x 3. Every divisor is a product of axes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from unisono.parallel import tensor_moves
from unisono.parallel.mesh import group_of, groups_along, unique_names
from unisono.parallel.tensor_moves import TensorAxis

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from unisono.parallel.costs.collectives import Link

Layout = tuple[Any, ...]  # one Placement per axis
WHOLE, SUM = Replicate(), Partial()
KINDS: dict[tuple[Any, Any], str] = {  # of the placements before and after
    (Replicate, Shard): "slice",
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
}
OF_ONE_DIM = {"slice": "slice", "all_gather": "gather", "all_reduce": "sum", "reduce_scatter": "scatter"}


# ---- the ranks ----


def primes(number: int) -> tuple[int, ...]:
    """Prime factors, smallest first; (1,) for 1. Example: 12 -> (2, 2, 3)."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(found) or (1,)


class RankGrid:
    """All ranks of the default group, by their coordinates on the axes; the last axis is the fastest."""

    def __init__(self) -> None:
        self.sizes = primes(dist.get_world_size())
        names = unique_names(f"axis{index}" for index in range(len(self.sizes)))
        ranks = torch.arange(dist.get_world_size()).view(self.sizes)
        self.mesh = DeviceMesh.from_group(groups_along(ranks), "cpu", mesh=ranks, mesh_dim_names=names)
        self._here = tuple(self.mesh.get_coordinate() or ())
        self._groups: dict[tuple[int, ...], Any] = {
            (axis,): self.mesh.get_group(axis) for axis in range(ranks.dim())
        }

    def ranks(self, axes: Sequence[int]) -> int:
        """The ranks that differ from this one in `axes` only."""
        return math.prod(self.sizes[axis] for axis in axes)

    def axis(self, axes: tuple[int, ...], *, talks: bool = True) -> TensorAxis:
        """Those ranks, and this one's number among them, the last axis fastest.

        Args:
            talks: with their process group; all ranks of the job call this in the same order.
        """
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + self._here[axis]
        if talks and axes not in self._groups:
            others = [axis for axis in range(len(self.sizes)) if axis not in axes]
            self._groups[axes] = group_of(
                self.mesh.mesh.permute(*others, *axes).reshape(-1, self.ranks(axes))
            )
        return TensorAxis(self._groups[axes] if talks else None, place, self.ranks(axes))


@functools.lru_cache(maxsize=1)
def grid_of(world: Any) -> RankGrid:  # noqa: ARG001  (the key: another group, another grid)
    """Return the grid of the default group `world`; made once."""
    return RankGrid()


# ---- the cheapest chain ----


class LayoutTransform(NamedTuple):
    """One step from a layout to the next.

    Args:
        kind: slice, all_gather, all_to_all, all_reduce or reduce_scatter.
        axes: the mesh axes of the group.
        source: the tensor dim that was cut; None for partial sums and whole values.
        target: the tensor dim that is cut afterwards.
    """

    kind: str
    axes: tuple[int, ...]
    source: int | None
    target: int | None


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
    for chosen in itertools.chain.from_iterable(itertools.combinations(axes, n + 1) for n in axes):
        source = layout[chosen[0]]
        if any(layout[axis] != source for axis in chosen) or not _minor(layout, chosen, source):
            continue
        for target in [WHOLE, *map(Shard, range(len(shape)))]:
            kind = KINDS.get((type(source), type(target)))
            following = tuple(target if axis in chosen else layout[axis] for axis in axes)
            if kind and target != source and _fits(following, chosen, target, shape, sizes):
                yield LayoutTransform(kind, chosen, _dim(source), _dim(target)), following


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _minor(layout: Layout, chosen: Sequence[int], placement: Placement) -> bool:
    """Whether `chosen` are the last of the axes that cut a dim."""
    cut = [axis for axis, p in enumerate(layout) if isinstance(p, Shard) and p == placement]
    return all(axis in chosen or axis < min(chosen) for axis in cut)


def _fits(
    layout: Layout, chosen: Sequence[int], target: Placement, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    if not isinstance(target, Shard):
        return True
    parts = math.prod(size for size, p in zip(sizes, layout, strict=True) if p == target)
    return shape[target.dim] % parts == 0 and _minor(layout, chosen, target)


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
        tensor_moves.refuse_second_gradient()
        return _follow(grad, ctx.back, *ctx.how), None, None, None, None


def path_of(value: DTensor, goal: Layout, sizes: tuple[int, ...], link: Link) -> TransformPath:
    """Find the cheapest way of `value` to `goal`."""
    start, shape = tuple(value.placements), tuple(value.shape)
    return transform_path(start, goal, shape, value.element_size(), sizes, link)


def _follow(value: DTensor, goal: Layout, grid: RankGrid, link: Link, where: str) -> DTensor:
    here, local, kept = tuple(value.placements), value.to_local().detach(), _current.get()
    for move in path_of(value, goal, grid.sizes, link).moves:
        ranks, nbytes, began = grid.ranks(move.axes), local.nbytes, time.perf_counter()
        local = _move(local, move, grid, f"up::{where}|{move.kind}")
        if kept is not None:
            kept.append(
                TransformRecord(
                    where, move, ranks, str(here), str(goal), link.received(move.kind, ranks, nbytes),
                    link.seconds(move.kind, ranks, nbytes), time.perf_counter() - began,
                )
            )  # fmt: skip
    return DTensor.from_local(local, grid.mesh, goal, run_check=False)


def _move(local: Tensor, move: LayoutTransform, grid: RankGrid, label: str) -> Tensor:
    axis = grid.axis(move.axes, talks=move.kind != "slice")
    if move.kind != "all_to_all":
        dim = move.source if move.target is None else move.target
        return tensor_moves.KINDS[OF_ONE_DIM[move.kind]][0](local, dim or 0, axis, label)
    assert move.source is not None
    assert move.target is not None
    cut = torch.stack(local.chunk(axis.parts, move.target))
    parts = torch.empty_like(cut)
    with record_function(label):
        dist.all_to_all_single(parts, cut, group=axis.group)
    return torch.cat(parts.unbind(0), move.source)


# ---- the record ----


class TransformRecord(NamedTuple):
    """One move. `nbytes`: received by this rank."""

    where: str
    move: LayoutTransform
    ranks: int
    start: str
    goal: str
    nbytes: float
    predicted_s: float
    measured_s: float


class Record(list[TransformRecord]):
    """The moves inside `with record() as moves:`; as text, a table."""

    def __str__(self) -> str:
        head = f"{'where':36} {'move':15} {'ranks':>5} {'bytes':>10} {'predicted':>10} {'measured':>10}  why"
        rows = [
            f"{e.where:36} {e.move.kind:15} {e.ranks:5} {e.nbytes:10.0f} {e.predicted_s * 1e6:8.1f}us "
            f"{e.measured_s * 1e6:8.1f}us  {e.start} -> {e.goal}"
            for e in self
        ]
        return "\n".join([head, *rows])


_current: ContextVar[Record | None] = ContextVar("moves", default=None)


@contextmanager
def record() -> Iterator[Record]:
    """Collect the moves that `up.shard`'s operators insert, forward and backward."""
    moves = Record()
    token = _current.set(moves)
    try:
        yield moves
    finally:
        _current.reset(token)
