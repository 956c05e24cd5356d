"""A rank's part of a value from one layout to another, by DTensor's redistribution; the record of what moves.

A layout has one placement of DTensor's per mesh axis: Replicate, Shard(dim), Partial(sum). Where several axes
cut one dim, the first axis is the major one. The mesh has prime sizes: 8 ranks are 2 x 2 x 2, 6 are 2 x 3.
Every divisor is a product of axes.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from unisono.parallel.costs.collectives import Link
from unisono.parallel.graph.program import columns
from unisono.parallel.mesh import new_group, unique_names
from unisono.parallel.tensor_moves import exchanged
from unisono.torch_internals.dtensor import all_to_all
from unisono.torch_internals.fake import OperatorMode
from unisono.torch_internals.group_use import ranks_of

Layout = tuple[Any, ...]  # one Placement per axis
WHOLE, SUM = Replicate(), Partial()
NAME = "_unisono_ranks"  # the attribute of a mesh: whose it is


# ---- the ranks ----


@functools.cache
def primes(number: int) -> tuple[int, ...]:
    """Prime factors, smallest first; (1,) for 1. Example: 12 -> (2, 2, 3)."""
    factor = next((factor for factor in range(2, number) if number % factor == 0), number)
    return (factor,) if factor == number else (factor, *primes(number // factor))


class OperatorRanks:
    """The ranks of a group, which run an operator together, and the moves of values between them.

    Attributes:
        axes: the sizes of their mesh, which are primes; the last axis is the fastest.
        places: of each axis its size, and this rank's place on it.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._ranks = group, torch.tensor(dist.get_process_group_ranks(group))
        self.axes = primes(len(self._ranks))
        place = (self._ranks.view(self.axes) == dist.get_rank()).nonzero()
        self.places = [*zip(self.axes, place[0].tolist(), strict=True)]
        self.whole: Layout = (WHOLE,) * len(self.axes)
        self._meshes: dict[tuple[str, tuple[int, ...]], DeviceMesh] = {}

    def mesh(self, device: str, sizes: tuple[int, ...] = ()) -> DeviceMesh:
        """Their mesh, or one of other sizes. All of them call this first together."""
        key = "cpu" if device == "meta" else device, sizes or self.axes
        if key not in self._meshes:
            ranks, names = self._ranks.view(key[1]), unique_names(f"axis{n}" for n in range(len(key[1])))
            groups = (
                [self._group] if ranks.dim() == 1 else [self._along(ranks, n) for n in range(ranks.dim())]
            )
            mesh = self._meshes[key] = DeviceMesh.from_group(groups, key[0], mesh=ranks, mesh_dim_names=names)
            setattr(mesh, NAME, self)
        return self._meshes[key]

    def _along(self, ranks: Tensor, axis: int) -> Any:
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist()
        return new_group(next(line for line in lines if dist.get_rank() in line), alone=True)

    def layout(self, value: Tensor) -> Layout:
        """The layout of a DTensor; a plain tensor is whole on all ranks."""
        return tuple(value.placements) if isinstance(value, DTensor) else self.whole

    def moved(self, value: Tensor, goal: Layout, contributed: Layout, where: str) -> Tensor:
        """This rank's part of a value, brought into the layout `goal`; differentiable.

        Args:
            contributed: the layout of the gradient: SUM on axes whose ranks have a share of it each.
            where: for the record.
        """
        start, local = self.layout(value), value
        if isinstance(value, DTensor):
            local = value.to_local(grad_placements=_back(start))
        return self.move(local, value.shape, (start, goal), contributed, where)

    def move(
        self, local: Tensor, size: Sequence[int], way: tuple[Layout, Layout], contributed: Layout, where: str
    ) -> Tensor:
        """The same for a rank's part of a value of this size. way: from a layout to another one."""
        (start, goal), shape = way, tuple(size)
        if start == goal and not (local.requires_grad and torch.is_grad_enabled()):
            return local

        def run(local: Tensor) -> Tensor:
            return self._redistributed(local, shape, start, goal, where)

        def back(grad: Tensor) -> Tensor:
            return self._redistributed(grad, shape, contributed, _back(start), f"{where}, backward")

        return exchanged(local, run, back)

    def _redistributed(self, local: Tensor, shape: Any, start: Layout, goal: Layout, where: str) -> Tensor:
        if start == goal:
            return local.view_as(local)
        sizes, before, after, turns = _joined(shape, self.axes, start, goal)
        mesh, token = self.mesh(local.device.type, sizes), _where.set(where)
        try:
            with record_function(f"up::shard|{where}"):
                if turns is not None:
                    group, source, target = mesh.get_group(turns), before[turns].dim, after[turns].dim
                    return _turned(local, group, sizes[turns], source, target)
                return placed(local.detach(), mesh, before, shape).redistribute(placements=after).to_local()
        finally:
            _where.reset(token)


ranks_of_group = functools.lru_cache(maxsize=64)(OperatorRanks)


# ---- the moves ----


def _back(layout: Layout) -> Layout:
    """The layout of a value's gradient: all contributions to a partial sum have the same one."""
    return tuple(WHOLE if isinstance(each, Partial) else each for each in layout)


@functools.lru_cache(maxsize=4096)
def _joined(shape: tuple[int, ...], primes: tuple[int, ...], start: Layout, goal: Layout) -> tuple[Any, ...]:
    """Sizes of axes, the layouts on them, and the axis whose change is one all-to-all.

    Axes side by side that change alike are one: one collective for all, where DTensor makes one for each.
    Uneven parts are cut axis by axis, so their axes stay.
    """
    axes = [*zip(primes, start, goal, strict=True)]
    for layout, (dim, size) in itertools.product((start, goal), enumerate(shape)):
        if size % math.prod(n for n, each in zip(primes, layout, strict=True) if each == Shard(dim)):
            return (*zip(*axes, strict=True), None)
    runs = [(pair, [*run]) for pair, run in itertools.groupby(axes, key=lambda axis: axis[1:])]
    joined = [(math.prod(n for n, *_ in run), *pair) for pair, run in runs]
    changed = [number for number, (_, before, after) in enumerate(joined) if before != after]
    pair, minor = joined[changed[0]][1:], [before for _, before, _ in joined[changed[0] + 1 :]]
    alone = len(changed) == 1 and all(isinstance(each, Shard) and each not in minor for each in pair)
    return (*zip(*joined, strict=True), changed[0] if alone else None)


def _turned(local: Tensor, group: Any, parts: int, source: int, target: int) -> Tensor:
    """Cut along another dim. On a CPU, DTensor would gather the whole and take a slice."""
    received = all_to_all(torch.stack(local.chunk(parts, target)), group)
    return torch.cat(received.unbind(0), source)


def placed(local: Tensor, mesh: DeviceMesh, layout: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """A rank's part of a value of this shape, as a DTensor."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, layout, run_check=False, shape=torch.Size(shape), stride=stride
    )


# ---- the record ----


class LayoutTransform(NamedTuple):
    """A collective that changes a layout: all_gather, all_reduce, reduce_scatter or all_to_all."""

    kind: str
    ranks: int


class TransformRecord(NamedTuple):
    """One move. `nbytes`: received by this rank. `where`: "": outside of operators."""

    where: str
    move: LayoutTransform
    nbytes: float
    predicted_s: float
    measured_s: float


class Record(list[TransformRecord]):
    """The moves inside `with record() as moves:`; as text, a table."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("where", "move", "ranks", "bytes", "predicted", "measured")]
        for where, move, nbytes, *seconds in self:
            times = [f"{each * 1e6:.1f}us" for each in seconds]
            rows.append((where, move.kind, str(move.ranks), f"{nbytes:.0f}", *times))
        return columns(rows, right=range(2, 6))


_where: ContextVar[str] = ContextVar("where", default="")


@contextmanager
def record(link: Link | None = None) -> Iterator[Record]:
    """Collect the collectives of `up.shard`'s operators and of DTensors, forward and backward.

    Args:
        link: the network, for the predicted times.
    """
    moves = Record()
    with _CollectiveRecorder(moves, link or Link()):
        yield moves


class _CollectiveRecorder(OperatorMode):
    """Sees the functional collectives, which DTensor calls."""

    KINDS = {  # noqa: RUF012  (never written)
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "all_reduce": "all_reduce",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
        "all_to_all_single": "all_to_all",
        "shard_dim_alltoall": "all_to_all",
    }

    def __init__(self, moves: Record, link: Link) -> None:
        super().__init__()
        self._moves, self._link = moves, link

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it calls comes here again
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        if func.namespace not in ("_c10d_functional", "_dtensor"):
            return result
        name = func.overloadpacket.__name__
        if kind := self.KINDS.get(name):
            of = kind, len(ranks_of(args[-1])), args[0].nbytes
            received, predicted = self._link.received(*of), self._link.seconds(*of)
            found = TransformRecord(_where.get(), LayoutTransform(*of[:2]), received, predicted, seconds)
            self._moves.append(found)
        elif name == "wait_tensor" and self._moves:
            last = self._moves[-1]
            self._moves[-1] = last._replace(measured_s=last.measured_s + seconds)
        return result
