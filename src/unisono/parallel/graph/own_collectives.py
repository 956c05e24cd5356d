"""Refuses a program that calls collectives of its own, such as a contrastive loss over all ranks.

Ranks that share a model have the same rows, and those of a pipeline run other parts of it. So what such a
program gathers is not the batch. Data ranks run the model's own forward, and may call what they like.
"""

from __future__ import annotations

from typing import Any

from .shapes import CaptureError

__all__ = ["check_collective"]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def check_collective(op: Any) -> None:
    """Raise CaptureError for an operator of torch.distributed."""
    if op.namespace in NAMESPACES:
        raise CaptureError(
            f"calls {op.overloadpacket.__name__.strip('_')} of torch.distributed, whose ranks have the same "
            "rows under this plan (use data= and zero=)",
            final=True,
        )
