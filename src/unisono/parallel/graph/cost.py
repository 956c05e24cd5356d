"""Floating-point operations of an operator, from its shapes. A multiplication with an addition counts 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["flops_of"]


def flops_of(op: Any, args: tuple[Any, ...], output: Any) -> int:
    """Count those of products, convolutions and attention, and one per element of an elementwise function.

    Example: aten.mm of [2, 3] and [3, 4]: 48.
    """
    name = str(op.overloadpacket)
    known = FORMULAS.get(name)
    if known is None and name.startswith("aten._scaled_dot_product"):
        known = _attention
    if known is not None:
        return known([arg for arg in args if isinstance(arg, Tensor)], output)
    return output.numel() if torch.Tag.pointwise in op.tags and isinstance(output, Tensor) else 0


def _product(tensors: list[Tensor], output: Any) -> int:
    return 2 * int(output.numel()) * int(tensors[-1].shape[-2])


def _convolution(tensors: list[Tensor], output: Any) -> int:
    return 2 * int(output.numel()) * math.prod(tensors[1].shape[1:])


def _attention(tensors: list[Tensor], _output: Any) -> int:
    q, k, v = tensors[:3]
    return 2 * math.prod(q.shape) * int(k.shape[-2]) + 2 * math.prod(q.shape[:-1]) * math.prod(v.shape[-2:])


FORMULAS: dict[str, Callable[[list[Tensor], Any], int]] = {
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"), _product),
    "aten.convolution": _convolution,
}
