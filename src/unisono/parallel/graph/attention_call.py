"""scaled_dot_product_attention as one operator of a recorded program.

PyTorch makes other operators of it by device, mask and dropout; one that is cut must be known as what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .noted_call import NotedOp

__all__ = ["ATTENTION", "FUNCTION", "bound", "calls_told", "gpu_attention"]

FUNCTION = "scaled_dot_product_attention"
DEFAULTS: dict[str, Any] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
    "scale": None, "enable_gqa": False,
}  # fmt: skip


def bound(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return DEFAULTS | dict(zip(DEFAULTS, args, strict=False)) | named


@contextlib.contextmanager
def calls_told(tell: Callable[[Any, Any, Any], Any] | None) -> Iterator[None]:
    """Tell of calls that PyTorch's own layers make, too: no function mode is told of them.

    Args:
        tell: (function, args, named) -> what the call returns; None: nobody is told.
    """
    function: Any = getattr(functional, FUNCTION)
    if tell is not None:
        setattr(functional, FUNCTION, lambda *args, **named: tell(function, args, named))
    try:
        yield
    finally:
        setattr(functional, FUNCTION, function)


ATTENTION: Any = NotedOp("unisono.attention", functional.scaled_dot_product_attention)


# ---- on a GPU ----


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
