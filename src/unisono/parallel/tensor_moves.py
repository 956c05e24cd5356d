"""What happens to a value on the tensor axis: nothing, a sum, a slice or a collective; and to its gradient.

| kind | forward | backward |
|---|---|---|
| enter | | all-reduce |
| sum | all-reduce | |
| total | all-reduce | all-reduce |
| gather | all-gather | this rank's slice |
| gather, sum | all-gather | reduce-scatter |
| scatter | reduce-scatter | all-gather |
| slice | this rank's slice | all-gather |

Each backward is the transpose of its forward, given what the ranks do with the value: Korthikanti et al.,
2022 (arXiv:2205.05198), figure 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function

from unisono.errors import UnfitError
from unisono.torch_internals import version_names
from unisono.torch_internals.fake import memory_of

NAME = "_unisono_regathered"  # the attribute of a value that was gathered


class Regathered:
    """A gathered value, kept as this rank's slice between forward and backward.

    Without this the layers of a cut would keep all positions of their input, as long as without a cut along
    the sequence. It costs one more all-gather for each value. Source: the same, section 4.2.2.

    Args:
        gather: makes the whole value of the slice. All ranks call it.
    """

    def __init__(self, mine: Tensor, whole: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self._mine, self._gather = mine.detach(), gather
        self._memory = memory_of(whole)[1]
        self._whole: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What to save in place of a tensor: for a view of the whole value, how to make it."""
        if memory_of(tensor)[1] != self._memory:
            return tensor
        return partial(self._view, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the whole value, which is gathered now, or was for another layer."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._gather(self._mine)
        return self._whole.as_strided(shape, stride, offset)

    def forget(self) -> None:
        """Free the whole value: the gradients of all layers that took it are known."""
        self._whole = None


def saved_as_slices(value: Tensor) -> AbstractContextManager[Any]:
    """While this lasts, autograd saves the slice in place of `value`, if it is a gathered value or a view."""
    found: Regathered | None = getattr(value, NAME, None) or getattr(value._base, NAME, None)
    return nullcontext() if found is None else saved_tensors_hooks(found.pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()  # type: ignore[no-any-return]


class TensorAxis(NamedTuple):
    """The ranks that share a model, and this one's place among them.

    Args:
        regathers: values that are gathered for layers are gathered again in backward, and not kept.
    """

    group: Any
    place: int
    parts: int
    regathers: bool = False

    def sum_(self, value: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        dist.all_reduce(value, group=self.group)

    def gather_into(self, every: Tensor, mine: Tensor) -> None:
        """Gather the tensors of all ranks, in their order."""
        version_names.all_gather_single(every, mine, group=self.group)

    def scatter_into(self, mine: Tensor, every: Tensor) -> None:
        """Sum a tensor over the ranks, and take this rank's part of it."""
        version_names.reduce_scatter_single(mine, every, group=self.group)


def move(value: Tensor, kind: str, dim: int, axis: TensorAxis, label: str) -> Tensor:
    """Make one move.

    Args:
        dim: what is sliced, or gathered.
        label: in a trace.
    Raises:
        ValueError: the ranks do not divide the dim that they share.
    """
    if kind == "enter" and not (value.requires_grad and torch.is_grad_enabled()):
        return value
    dim %= max(value.dim(), 1)
    if kind in ("slice", "scatter") and value.shape[dim] % axis.parts:
        raise UnfitError(
            f"tensor={axis.parts} does not divide the {value.shape[dim]} positions of {list(value.shape)}"
        )
    keeps = axis.regathers and kind == "gather, sum" and value.requires_grad and torch.is_grad_enabled()
    (run, back), slices = KINDS[kind], list[Regathered]()

    def backward(grad: Tensor) -> Tensor:
        for each in slices:
            each.forget()
        return back(grad, dim, axis, label)

    moved = exchanged(value, lambda value: run(value, dim, axis, label), backward)
    if keeps:
        slices.append(Regathered(value, moved, lambda mine: _gather(mine, dim, axis, label)))
        setattr(moved, NAME, slices[0])
    return moved


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        ctx.back = back
        return run(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refuse_second_gradient()
        return ctx.back(grad), None, None


def exchanged(value: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`run` of a value; its gradient is `back` of that of the result. Neither is followed by autograd."""
    found: Tensor = _Exchanged.apply(value, run, back)
    return found


def refuse_second_gradient() -> None:
    """Raise RuntimeError in a backward whose gradient is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient is differentiated again (create_graph=True), through a layer that is cut on the "
            "tensor axis, along a sequence, or by up.shard. Leave out tensor=, or write cuts= with the "
            'modules that it goes through as "whole"; leave out context= or up.shard'
        )


def _keep(value: Tensor, _dim: int, _axis: TensorAxis, _label: str) -> Tensor:
    return value.view_as(value)


def _sum(value: Tensor, _dim: int, axis: TensorAxis, label: str) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    with record_function(label):
        axis.sum_(total)
    return total


def _slice(value: Tensor, dim: int, axis: TensorAxis, _label: str) -> Tensor:
    size = value.shape[dim] // axis.parts
    return value.narrow(dim, axis.place * size, size).clone(memory_format=torch.contiguous_format)


def _gather(value: Tensor, dim: int, axis: TensorAxis, label: str) -> Tensor:
    every = value.new_empty(axis.parts, *value.shape)
    with record_function(label):
        axis.gather_into(every, value.contiguous())
    if math.prod(value.shape[:dim]) == 1:  # they lie in order
        return every.view(*value.shape[:dim], axis.parts * value.shape[dim], *value.shape[dim + 1 :])
    return torch.cat(every.unbind(0), dim)


def _scatter(value: Tensor, dim: int, axis: TensorAxis, label: str) -> Tensor:
    chunks = value.chunk(axis.parts, dim)
    mine = value.new_empty(chunks[0].shape)
    in_order = math.prod(value.shape[:dim]) == 1
    every = value.contiguous() if in_order else torch.stack(chunks)
    with record_function(label):
        axis.scatter_into(mine, every.view(axis.parts, *mine.shape).flatten(0, 1))
    return mine


_How = Callable[[Tensor, int, TensorAxis, str], Tensor]
KINDS: dict[str, tuple[_How, _How]] = {
    "enter": (_keep, _sum),
    "sum": (_sum, _keep),
    "total": (_sum, _sum),
    "gather": (_gather, _slice),
    "gather, sum": (_gather, _scatter),
    "scatter": (_scatter, _gather),
    "slice": (_slice, _gather),
}
