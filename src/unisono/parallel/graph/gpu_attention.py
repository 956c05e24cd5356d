"""Attention on shapes as a GPU computes it, wherever the shapes are.

A CPU has no fused kernel with dropout, which then keeps what is length x length; a GPU's draws the mask again
in backward. A GPU has none for grouped heads in f32, where a CPU has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention_call import bound, calls_told

__all__ = ["gpu_attention"]


@contextlib.contextmanager
def gpu_attention(*, on_gpu: bool) -> Iterator[None]:
    """Calls of `scaled_dot_product_attention` run the operators of a GPU's.

    Args:
        on_gpu: shapes are those of a GPU; otherwise nothing changes.
    """
    with calls_told(_call if on_gpu else None):
        yield


def _call(function: Callable[..., Any], args: Any, named: Any) -> Any:
    call = bound(args, named)
    query, key = call["query"], call["key"]
    if query.dim() != 4:
        return function(*args, **named)
    if query.dtype == torch.float32 and query.shape[1] != key.shape[1]:
        with sdpa_kernel(SDPBackend.MATH):
            return function(**call)
    return function(**{**call, "dropout_p": 0.0})
