"""Refuses a program that calls collectives of its own, such as a contrastive loss over all ranks.

Ranks that share a model have the same rows, and those of a pipeline run other parts of it. So what such a
program gathers is not the batch. Data ranks run the model's own forward, and may call what they like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.torch_internals.group_use import within

from .shapes import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

__all__ = ["check_collective", "guard_of_loss"]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def check_collective(op: Any) -> None:
    """Raise CaptureError for an operator of torch.distributed."""
    if op.namespace in NAMESPACES:
        raise CaptureError(
            f"calls {op.overloadpacket.__name__.strip('_')} of torch.distributed, whose ranks have the same "
            "rows under this plan (use data= and zero=)",
            final=True,
        )


def guard_of_loss(ranks: Iterable[int]) -> Callable[[], AbstractContextManager[None]]:
    """Within it collectives with ranks that do not have the last stage raise: those do not run the loss."""
    last = frozenset(ranks)

    def refuse(name: str, who: str) -> None:
        raise ValueError(
            f"the loss calls {name} with {who}, and not all of them come: under pipeline= the ranks of the "
            f"last stage alone compute the loss, {sorted(last)}. Call it outside of the step, or with those "
            "ranks only (use data= and zero= for a loss over all ranks)"
        )

    return lambda: within(last, refuse)
