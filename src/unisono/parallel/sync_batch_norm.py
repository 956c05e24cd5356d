"""BatchNorm over the rows of all data ranks, as one process with the whole batch has it.

PyTorch's SyncBatchNorm runs on GPUs only. Source: Ioffe, Szegedy, Batch Normalization, ICML 2015, with sums
over all ranks. One all-reduce in forward: rows, sums, sums of squares. One in backward: the sums of the
gradients and of their products with the normalised values. Both are f64, so that nothing cancels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function

from unisono.torch_internals import training
from unisono.torch_internals.fake import is_fake

from .precision import BATCH_NORM

if TYPE_CHECKING:
    from .mesh import PlanMesh

__all__ = ["NormSums", "statistics_stand_apart", "sync_batch_norms"]

FORWARDS = (BATCH_NORM.forward, nn.SyncBatchNorm.forward)


def sync_batch_norms(model: nn.Module, mesh: PlanMesh) -> NormSums:
    """Have every BatchNorm take the rows of all data ranks, if the plan says so, once the sums have begun.

    All ranks call this.

    Raises:
        ValueError: one has a forward of its own.
    """
    modules = model.named_modules() if mesh.plan.sync_batch_norm else ()
    norms = {path: module for path, module in modules if isinstance(module, BATCH_NORM)}
    for path, module in norms.items():
        if type(module).forward not in FORWARDS or "forward" in vars(module):
            raise ValueError(
                f'sync_batch_norm=True: "{path}" is a {type(module).__name__} with a forward of its own, '
                "whose statistics cannot be those of all ranks. Use PyTorch's nn.BatchNorm*d"
            )
    if mesh.plan.data == 1 or not norms:
        return NormSums(None)
    sums = NormSums(mesh.data_group())
    for module in norms.values():
        module.__class__ = _synced(type(module))  # type: ignore[arg-type]
        vars(module)["_sums"] = sums
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
    return type(kind.__name__, (_SyncedForward, kind), {})


class _SyncedForward:
    """The forward, with statistics of all ranks where they are those of the batch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not of_batch or not self._sums.active or is_fake(x):
            return BATCH_NORM.forward(self, x)  # type: ignore[no-any-return]
        training.check_dimensions(self, x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed, mean, var, total = _Normalized.apply(wide, self._sums, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats and self.running_mean is not None:
            _track(self, mean, var * (total / (total - 1)))
        shape = (1, -1, *[1] * (x.dim() - 2))
        if self.weight is not None:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed.to(x.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def _track(norm: Any, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics as BatchNorm does."""
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if share is None:  # the mean of all batches
            share = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(var.to(norm.running_var.dtype), share)


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
