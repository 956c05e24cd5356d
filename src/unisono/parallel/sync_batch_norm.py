"""BatchNorm over the rows of all data ranks, as one process with the whole batch has it.

PyTorch's SyncBatchNorm runs on GPUs only. Source: Ioffe, Szegedy, Batch Normalization, ICML 2015, with sums
over all ranks. One all-reduce in forward: rows, sums, sums of squares. One in backward: the sums of the
gradients and of their products with the normalised values. Both are f64, so that nothing cancels.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unisono.torch_internals import training
from unisono.torch_internals.fake import is_fake

from .graph.containers import tensors_in
from .precision import BATCH_NORM

if TYPE_CHECKING:
    from .mesh import PlanMesh

FORWARDS = (BATCH_NORM.forward, nn.SyncBatchNorm.forward)
BATCH_NORM_SIGNATURE = inspect.signature(functional.batch_norm)
REMEDY = "Use PyTorch's nn.BatchNorm*d, or call functional.batch_norm in the forward"


def sync_batch_norms(model: nn.Module, mesh: PlanMesh) -> NormSums:
    """Have every BatchNorm take the rows of all data ranks, if the plan says so, once the sums have begun.

    All ranks call this.

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
    known = (*FORWARDS, _SyncedForward.forward)
    return isinstance(module, BATCH_NORM) and module.training and type(module).forward in known


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
    base = _SyncedForward if kind.forward in FORWARDS else _SyncedCall
    return type(kind.__name__, (base, kind), {})


class _SyncedForward:
    """PyTorch's forward, with statistics of all ranks where they are those of the batch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not of_batch or not self._sums.active or is_fake(x):
            return BATCH_NORM.forward(self, x)  # type: ignore[no-any-return]
        training.check_dimensions(self, x)
        if self.training and self.track_running_stats and self.running_mean is not None:
            share = _count(self)
            return normalized(
                x, self._sums, self.running_mean, self.running_var, self.weight, self.bias, share, self.eps
            )
        return normalized(x, self._sums, None, None, self.weight, self.bias, 0.0, self.eps)


class _SyncedCall:
    """The forward of a subclass, whose `functional.batch_norm` takes statistics of all ranks."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if not self._sums.active or not self.training or any(map(is_fake, tensors_in((args, named)))):
            return super().forward(*args, **named)  # type: ignore[misc]
        with _BatchNormCalls(self._sums) as calls:
            output = super().forward(*args, **named)  # type: ignore[misc]
        if not calls.seen:
            raise ValueError(
                f'sync_batch_norm=True: "{self._path}" is a {type(self).__name__}, whose forward does not '
                f"call functional.batch_norm, so its statistics cannot be those of all ranks. {REMEDY}"
            )
        return output


class _BatchNormCalls(TorchFunctionMode):
    """While it is active, `functional.batch_norm` normalises by the rows of all ranks.

    Attributes:
        seen: it was called, in training or not.
    """

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


def _count(norm: Any) -> float:
    """Count a batch as BatchNorm does; return its share of the running statistics."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the mean of all batches
            return 1.0 / float(norm.num_batches_tracked)
    return float(norm.momentum)


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
