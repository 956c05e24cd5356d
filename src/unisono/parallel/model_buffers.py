"""Buffers that a forward changes, such as BatchNorm's statistics: equal on all data ranks after each step.

| buffer that changed | its value after a step, and in a checkpoint |
|---|---|
| floating | the average over the data ranks; under Plan(buffers="first") the values of the first one |
| others | the values of the first data rank |
| not persistent, of different sizes on different ranks | each rank's own: a cache |

Under Plan(buffers="own") they stay each rank's own, and a checkpoint has those of the first data rank.

Each stage and each place on the tensor axis has buffers of its own. Ranks of the tensor axis compute the same
ones: a buffer that the program writes is never cut.

Under Plan(sync_batch_norm=True) BatchNorm takes the rows of all data ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unisono.torch_internals.fake import is_fake
from unisono.torch_internals.training import persistent

from .graph.containers import tensors_in
from .mesh import PlanMesh
from .precision import BATCH_NORM

# PyTorch writes their statistics without a new version of the tensor
NORMS = (BATCH_NORM, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
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
        self._first, self._kind = mesh.copy == 0, mesh.plan.buffers
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
        floats = [
            torch.view_as_real(value) if value.is_complex() else value for value in values if _is_float(value)
        ]
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
            for value, part in zip(several, flat.split([each.numel() for each in several]), strict=True):
                value.copy_(part.view(value.shape))


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


# ---- BatchNorm over the rows of all data ranks ----


FORWARDS = (BATCH_NORM.forward, nn.SyncBatchNorm.forward)
BATCH_NORM_SIGNATURE = inspect.signature(functional.batch_norm)
REMEDY = "Use PyTorch's nn.BatchNorm*d, or call functional.batch_norm in the forward"


def sync_batch_norms(model: nn.Module, mesh: PlanMesh) -> NormSums:
    """Have every BatchNorm take the rows of all data ranks, if the plan says so, once the sums have begun: as
    one process with the whole batch does. All ranks call this.

    PyTorch's SyncBatchNorm runs on GPUs only. Source: Ioffe, Szegedy, Batch Normalization, ICML 2015, with
    sums over all ranks. One all-reduce in forward: rows, sums, sums of squares. One in backward: the sums of
    the gradients and of their products with the normalised values. Both are f64, so that nothing cancels.

    A forward of a subclass runs as it is, but for its `functional.batch_norm`.

    Raises:
        ValueError: one has its forward in an attribute.
    """
    modules = model.named_modules() if mesh.plan.sync_batch_norm else ()
    norms = {path: module for path, module in modules if isinstance(module, BATCH_NORM)}
    for path, module in norms.items():
        if "forward" in vars(module):
            raise ValueError(
                f'sync_batch_norm=True: "{path}" is a {type(module).__name__} whose forward is an attribute, '
                f"so its statistics cannot be those of all ranks. {REMEDY}"
            )
    if mesh.plan.data == 1 or not norms:
        return NormSums(None)
    sums = NormSums(mesh.data_group())
    for path, module in norms.items():
        module.__class__ = _synced(type(module))  # type: ignore[arg-type]
        vars(module)["_sums"], vars(module)["_path"] = sums, path
    return sums


def statistics_stand_apart(module: nn.Module) -> bool:
    """Whether it is a BatchNorm in training: it moves statistics, and its output does not follow them."""
    kind: Any = type(module)
    return (
        isinstance(module, BATCH_NORM)
        and module.training
        and getattr(kind, "is_plain", kind.forward in FORWARDS)
    )


class NormSums:
    """Sums over the data ranks. A copy of a model has the same.

    Attributes:
        active: all ranks run the model; before, one may run parts of it by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self.active = group, False

    def begin(self) -> list[dist.ProcessGroup]:
        """From now on all ranks run the model; return the groups of the sums."""
        self.active = True
        return [] if self._group is None else [self._group]

    def __deepcopy__(self, _memo: dict[int, Any]) -> NormSums:
        return self

    def add_up(self, value: Tensor) -> None:
        """Sum `value` over the ranks, in place."""
        with record_function("up::norms|BatchNorm"):
            dist.all_reduce(value, group=self._group)


@functools.cache
def _synced(kind: Any) -> type[Any]:
    """The class of a BatchNorm that takes the rows of all ranks."""
    return type(kind.__name__, (_Synced, kind), {"is_plain": kind.forward in FORWARDS})


class _Synced:
    """The forward of a BatchNorm, whose `functional.batch_norm` takes statistics of all ranks.

    Attributes:
        is_plain: the forward is PyTorch's.
    """

    is_plain: bool

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        run = functools.partial(BATCH_NORM.forward, self) if self.is_plain else super().forward  # type: ignore[misc]
        skips = not (self.training or self.is_plain) or any(map(is_fake, tensors_in((args, named))))
        if not self._sums.active or skips:
            return run(*args, **named)
        with _BatchNormCalls(self._sums) as calls:
            output = run(*args, **named)
        if not calls.seen:
            raise ValueError(
                f'sync_batch_norm=True: "{self._path}" is a {type(self).__name__}, whose forward does not '
                f"call functional.batch_norm, so its statistics cannot be those of all ranks. {REMEDY}"
            )
        return output


class _BatchNormCalls(TorchFunctionMode):
    """While it is active, `functional.batch_norm` normalises by the rows of all ranks."""

    def __init__(self, sums: NormSums) -> None:
        super().__init__()
        self._sums, self.seen = sums, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        if function is not functional.batch_norm:
            return function(*args, **(named or {}))
        self.seen = True
        call = BATCH_NORM_SIGNATURE.bind(*args, **(named or {}))
        call.apply_defaults()
        x, mean, var, weight, bias, of_batch, share, eps = call.args
        if not of_batch:
            return function(*args, **(named or {}))
        return normalized(x, self._sums, mean, var, weight, bias, share, eps)


def normalized(
    x: Tensor,
    sums: NormSums,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """What `functional.batch_norm` returns in training for the rows of all ranks.

    Shapes: x [rows, channels, ...], the others [channels]. mean, var: running statistics, which move.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed, found, spread, total = _Normalized.apply(wide, sums, eps)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if mean is not None:
            mean.lerp_(found.to(mean.dtype), momentum)
        if var is not None:
            var.lerp_((spread * (total / (total - 1))).to(var.dtype), momentum)
    shape = (1, -1, *[1] * (x.dim() - 2))
    if weight is not None:
        normed = normed * weight.view(shape)
    if bias is not None:
        normed = normed + bias.view(shape)
    return normed.to(x.dtype)  # type: ignore[no-any-return]


class _Normalized(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) by channel, and mean, var (f64 [channels]) and rows over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: NormSums, eps: float) -> tuple[Tensor, Tensor, Tensor, float]:
        dims, count = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        var, mean = (one.double() for one in torch.var_mean(x, dims, correction=0))
        table = torch.cat([mean * count, (var + mean * mean) * count, mean.new_tensor([count])])
        sums.add_up(table)
        total = float(table[-1])
        if total <= 1:
            raise ValueError("BatchNorm needs more than one value per channel, over all data ranks")
        mean, squares = (table[:-1] / total).chunk(2)
        var = (squares - mean * mean).clamp(min=0.0)
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = (var + eps).rsqrt().to(x.dtype).view(shape)
        normed = (x - mean.to(x.dtype).view(shape)) * scale
        ctx.save_for_backward(normed, scale)
        ctx.sums, ctx.total, ctx.dims = sums, total, dims
        ctx.mark_non_differentiable(mean, var)
        return normed, mean, var, total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        normed, scale = ctx.saved_tensors
        both = [one.sum(ctx.dims, dtype=torch.float64) for one in (grad, grad * normed)]
        table = torch.cat(both)
        ctx.sums.add_up(table)
        of_grad, of_product = ((one / ctx.total).to(grad.dtype).view(scale.shape) for one in table.chunk(2))
        return (grad - of_grad - normed * of_product) * scale, None, None
