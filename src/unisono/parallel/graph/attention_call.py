"""scaled_dot_product_attention as one operator of a recorded program.

PyTorch makes other operators of it by device, mask and dropout; one that is cut must be known as what it is.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from .noted_call import NotedOp

__all__ = ["ATTENTION", "FUNCTION", "bound"]

FUNCTION = "scaled_dot_product_attention"
DEFAULTS: dict[str, Any] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
    "scale": None, "enable_gqa": False,
}  # fmt: skip


def bound(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return DEFAULTS | dict(zip(DEFAULTS, args, strict=False)) | named


ATTENTION: Any = NotedOp("unisono.attention", functional.scaled_dot_product_attention)
