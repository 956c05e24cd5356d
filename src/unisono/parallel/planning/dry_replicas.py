"""The data axis of a dry run under ZeRO 0: what ReplicatedParameters keeps in memory, without messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unisono.parallel.replicated_parameters import BUCKET_BYTES

from .storage_watch import StorageWatch

if TYPE_CHECKING:
    from unisono.parallel.plan import Plan

__all__ = ["DryReplicas"]


class DryReplicas:
    """Every rank holds all parameters in f32; gradients are averaged in buckets.

    Args:
        experts: parameters that one in `expert` ranks holds.
    """

    def __init__(self, root: nn.Module, plan: Plan, watch: StorageWatch, experts: set[nn.Parameter]) -> None:
        self.root, self.compression = root, None
        self._buckets: list[tuple[list[nn.Parameter], list[Tensor]]] = []
        trained = [value for value in root.parameters() if value.requires_grad]
        for copies, held in (
            (plan.copies, [value for value in trained if value not in experts]),
            (plan.copies // plan.expert, [value for value in trained if value in experts]),
        ):
            with watch.labelled("buffers"):
                for dtype in dict.fromkeys(value.dtype for value in held) if copies > 1 else ():
                    self._fill([value for value in reversed(held) if value.dtype == dtype])

    def _fill(self, values: Iterable[nn.Parameter]) -> None:
        held: list[nn.Parameter] = []
        for value in values:
            held.append(value)
            if sum(each.nbytes for each in held) >= BUCKET_BYTES:
                self._bucket(held)
                held = []
        if held:
            self._bucket(held)

    def _bucket(self, held: list[nn.Parameter]) -> None:
        sizes = [value.numel() for value in held]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=held[0].dtype, device=held[0].device)
        parts = flat.split([*sizes, len(sizes)])[:-1]
        self._buckets.append(
            (held, [part.view(value.shape) for part, value in zip(parts, held, strict=True)])
        )

    def before_backward(self, *, last: bool) -> None:
        """Nothing changes."""

    def after_backward(self) -> None:
        """Nothing changes."""

    def after_weights(self) -> None:
        """Gradients add up in place."""

    def reduce_now(self) -> None:
        """`finish` does it."""

    def reset(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """The averages take the place of the gradients."""
        for held, parts in self._buckets:
            for value, part in zip(held, parts, strict=True):
                if value.grad is not None:
                    value.grad = part
