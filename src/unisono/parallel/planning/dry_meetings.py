"""The meetings of replicas that train on their own, in a dry run: their memory, and no message."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.parallel.outer_optimizer import OuterOptimizer

if TYPE_CHECKING:
    import torch

    from unisono.parallel.plan import Plan

    from .dry_compression import DryCompression

__all__ = ["DryMeetings"]


class DryMeetings(OuterOptimizer):
    """What `OuterOptimizer` keeps in memory.

    Args:
        trained: this rank's parameters by name.    plan: of all replicas.
        compressed: of differences; None: they are whole.
    """

    def __init__(
        self, trained: Mapping[str, Tensor], plan: Plan, compressed: DryCompression | None = None
    ) -> None:
        self._compressed = compressed
        everyone = SimpleNamespace(plan=plan, group=lambda _: None)
        buffers: Any = SimpleNamespace(changed=lambda: (), synchronize=lambda _: None)
        mesh: Any = SimpleNamespace(everyone=everyone)
        super().__init__(trained, buffers, mesh)

    @property
    def optimizer(self) -> torch.optim.SGD | None:
        """What steps the anchors; None: nothing is trained."""
        return self._sgd

    def _exchange(self) -> None:
        for bucket in self._buckets:
            bucket.fill()
            if self._compressed is not None:
                self._compressed.exchange(list(zip(bucket.parameters, bucket.parts, strict=True)))
        if self._compressed is not None:
            self._compressed.finish()
        for bucket in self._buckets:
            bucket.finish()
