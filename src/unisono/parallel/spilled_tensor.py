"""The class of a tensor while its values are elsewhere: what reads or writes them raises.

Its memory has been released, so a kernel that reads it would end the interpreter. What needs no values goes
on: shape, dtype, gradient, hooks.
"""

from __future__ import annotations

import functools
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor

from unisono.torch_internals.training import plainly

PROPERTIES = (GetSetDescriptorType, property)
VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # properties that read or write values
OTHERS = frozenset({
    Tensor.dim, Tensor.element_size, Tensor.get_device, Tensor.is_complex, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.ndimension, Tensor.nelement, Tensor.new_empty, Tensor.new_full,
    Tensor.new_ones, Tensor.new_zeros, Tensor.numel, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.retain_grad, Tensor.size,
    Tensor.stride, Tensor.__len__, torch.empty_like, torch.full_like, torch.is_complex,
    Tensor.untyped_storage, torch.is_floating_point, torch.numel, torch.ones_like, torch.rand_like,
    torch.randn_like, torch.zeros_like,
})  # fmt: skip


def mark_spilled(tensor: Tensor) -> None:
    """Make reading or writing the values of `tensor` an error."""
    if tensor.numel() and not is_spilled(tensor):
        tensor.__class__ = _class_for(type(tensor))


def unmark_spilled(tensor: Tensor) -> None:
    """Undo `mark_spilled`."""
    if isinstance(tensor, _SpilledTensor):
        unchanged: Any = tensor
        unchanged.__class__ = unchanged.kind


def is_spilled(tensor: Tensor) -> bool:
    """Whether `mark_spilled` was called, and `unmark_spilled` was not."""
    return isinstance(tensor, _SpilledTensor)


class _SpilledTensor:
    kind: type[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what needs no values."""
        about = getattr(func, "__self__", None)
        about = about if isinstance(about, PROPERTIES) else None  # of its getter or setter
        if func in OTHERS or (about is not None and getattr(about, "__name__", "data") not in VALUES):
            return plainly(func, args, kwargs or {})
        tensor = next(each for each in _flat((args, kwargs)) if is_spilled(each))
        shape = list(plainly(Tensor.size, (tensor,), {}))
        if func is Tensor.__repr__:
            return f"<a parameter or its state, {shape}, swapped out>"
        name = getattr(about, "__name__", getattr(func, "__name__", func))
        raise RuntimeError(
            f"{name} of a swapped tensor of shape {shape}: its values are in memory only while its unit "
            "computes. Read and write them inside `with run.swap.mapped():` (of up.Swapped: "
            "`with swapped.mapped():`), or after close()"
        )


def _flat(given: Any) -> Any:
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (list, tuple)):
        yield given
        return
    for one in given:
        yield from _flat(one)


@functools.cache
def _class_for(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Away{kind.__name__}", (_SpilledTensor, kind), {"kind": kind})
