"""Buffers that a forward changes, such as BatchNorm's statistics: equal on all data ranks after each step.

| buffer that changed | its value after a step, and in a checkpoint |
|---|---|
| floating | the average over the data ranks; under Plan(buffers="first") the values of the first one |
| others | the values of the first data rank |
| not persistent, of different sizes on different ranks | each rank's own: a cache |

Under Plan(buffers="own") they stay each rank's own, and a checkpoint has those of the first data rank.

Each stage and each place on the tensor axis has buffers of its own. Ranks of the tensor axis compute the same
ones: a buffer that the program writes is never cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.torch_internals.training import persistent

from .sync_batch_norm import statistics_stand_apart

if TYPE_CHECKING:
    from .mesh import PlanMesh

# PyTorch writes their statistics without a new version of the tensor
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


BufferKind = tuple[str, str, tuple[int, ...]]


class BufferSlot(NamedTuple):
    """Where a buffer is. The tensor there may be replaced."""

    name: str  # in the user's model
    module: nn.Module
    leaf: str

    @property
    def value(self) -> Tensor | None:
        """The tensor that is there now."""
        return self.module._buffers.get(self.leaf)

    @property
    def kind(self) -> BufferKind:
        """Its name, dtype and shape."""
        value = self.value
        assert value is not None
        return self.name, str(value.dtype), tuple(value.shape)

    @property
    def mark(self) -> tuple[Tensor | None, int]:
        """The tensor and its version. The reference prevents a later tensor from having the same id."""
        value = self.value
        return value, 0 if value is None or value.is_inference() else value._version

    def changed(self, was: Tensor | None, version: int) -> bool:
        """Whether it is another tensor than it was, or may have other values."""
        now, count = self.mark
        unseen = isinstance(self.module, NORMS) and self.module.training
        return unseen or now is not was or count != version


class _KeptBuffer(NamedTuple):
    """A buffer as it was: the tensor, its version, and a copy of its values."""

    tensor: Tensor | None
    version: int
    value: Tensor | None


class ModelBuffers:
    """The buffers of one rank.

    Args:
        modules: those that compute on this rank, by their paths in the user's model.
        again: modules whose forward runs twice (recompute=True).
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], again: Iterable[nn.Module], mesh: PlanMesh
    ) -> None:
        self._places = [
            BufferSlot(f"{path}.{leaf}".lstrip("."), module, leaf)
            for path, module in modules
            for leaf in module._buffers
        ]
        self._again = {inner for module in again for inner in module.modules()}
        self._groups = [mesh.group(axis) for axis in ("replica", "shard")] if mesh.plan.copies > 1 else []
        self._first, self._kind = mesh.row == mesh.context_place == 0, mesh.plan.buffers
        self._device = mesh.axes.device_type
        self._marks = [place.mark for place in self._places]

    def changed(self) -> list[bool]:
        """Which buffers changed since `note`: with one of a module all of it."""
        pairs = zip(self._places, self._marks, strict=True)
        moved = {place.module for place, mark in pairs if place.changed(*mark)}
        return [place.module in moved for place in self._places]

    @property
    def slots(self) -> dict[str, BufferSlot]:
        """Every buffer by its name."""
        return {place.name: place for place in self._places}

    @property
    def caches(self) -> dict[str, BufferSlot]:
        """By name, what no checkpoint has: buffers that are not persistent, and have a value."""
        return {
            place.name: place
            for place in self._places
            if place.value is not None and not persistent(place.module, place.leaf)
        }

    def values(self) -> list[_KeptBuffer]:
        """Copies of all buffers, for `restore`."""
        return [
            _KeptBuffer(*place.mark, None if place.value is None else place.value.clone())
            for place in self._places
        ]

    @torch.no_grad()
    def restore(self, values: list[_KeptBuffer]) -> None:
        """Give those that changed since `values` their earlier values."""
        for place, (was, version, value) in zip(self._places, values, strict=True):
            now = place.value
            if not place.changed(was, version):
                continue
            if now is not None and value is not None and now.shape == value.shape:
                now.copy_(value)
            else:
                place.module._buffers[place.leaf] = value
        self.note()

    def note(self) -> None:
        """Take the buffers as they are for unchanged."""
        self._marks = [place.mark for place in self._places]

    def lasting(self, changed: list[bool], *, twice: bool = False) -> str | None:
        """The name of a persistent buffer that changed; `twice`: in a module whose forward runs twice."""
        for place, moved in zip(self._places, changed, strict=True):
            kept = moved and place.value is not None and persistent(place.module, place.leaf)
            again = place.module in self._again and not statistics_stand_apart(place.module)
            if kept and (again or not twice):
                return place.name
        return None

    def synchronize(self, changed: list[bool]) -> None:
        """Make equal what changed on some data rank. All ranks call this.

        Raises:
            RuntimeError: a buffer of a checkpoint has different sizes on different ranks.
        """
        if self._groups and self._places and self._kind != "own":
            self._synchronize(changed)
        self.note()

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Have the values of a checkpoint: equal ones, for good, or the first rank's meanwhile."""
        if self._kind != "own" or not self._groups or not self._places:
            self.synchronize(self.changed())
            yield
            return
        kept = self.values()
        try:
            self._synchronize([True] * len(self._places))
            yield
        finally:
            self.restore(kept)

    def _agree(self, changed: list[bool]) -> list[BufferSlot]:
        """What changed somewhere, but for caches whose sizes differ."""
        sizes = [-1 if place.value is None else place.value.numel() for place in self._places]
        told = torch.tensor(
            [[int(one), size, -size] for one, size in zip(changed, sizes, strict=True)], device=self._device
        )
        for group in self._groups:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        found = []
        for place, (moved, most, least) in zip(self._places, told.tolist(), strict=True):
            if moved and most == -least:
                found.append(place)
            elif moved and persistent(place.module, place.leaf):
                raise RuntimeError(
                    f"buffer {place.name!r} has {-least} values on one rank and {most} on another, and "
                    "no average. Register it with persistent=False, if it is a cache"
                )
        return found

    @torch.no_grad()
    def _synchronize(self, changed: list[bool]) -> None:
        with record_function("up::buffers|statistics"):
            self._make_equal([place.value for place in self._agree(changed) if place.value is not None])

    def _make_equal(self, values: list[Tensor]) -> None:
        floats = [_real(value) for value in values if _is_float(value)]
        others = [value for value in values if not _is_float(value)]
        averaged = self._kind == "average"
        for several, wide, average in ((floats, torch.float64, averaged), (others, torch.int64, False)):
            if not several:
                continue
            flat = torch.cat([value.flatten().to(wide) for value in several])
            if not average and not self._first:
                flat.zero_()
            for group in self._groups:
                dist.all_reduce(flat, op=dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group=group)
            _unpack(flat, several)


@contextlib.contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The own buffers of these modules are afterwards as they were, without a new version for autograd."""
    places = [(module._buffers, leaf) for module in modules for leaf in module._buffers]
    kept = [(held, leaf, value, value.clone()) for held, leaf in places if (value := held[leaf]) is not None]
    try:
        yield
    finally:
        for held, leaf, value, was in kept:
            value.data.copy_(was)
            held[leaf] = value


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _unpack(flat: Tensor, values: list[Tensor]) -> None:
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view(value.shape))
