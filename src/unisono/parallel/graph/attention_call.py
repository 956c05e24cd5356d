"""scaled_dot_product_attention as one operator of a recorded program.

PyTorch makes other operators of it by device, mask and dropout; one that is cut must be known as what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import functional

from .noted_call import NotedOp

__all__ = ["ATTENTION", "FUNCTION", "bound", "calls_told"]

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
