"""The data axis of a dry run under ZeRO 0: what ReplicatedParameters keeps in memory, without messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel.outer_optimizer import OuterOptimizer
from unisono.parallel.replicated_parameters import BUCKET_BYTES

from .storage_watch import StorageWatch

if TYPE_CHECKING:
    import torch

    from unisono.parallel.plan import Plan

    from .dry_compression import DryCompression

__all__ = ["DryMeetings", "DryReplicas"]


class DryReplicas:
    """Every rank holds all parameters in f32; gradients are averaged in buckets.

    Args:
        experts: parameters that one in `expert` ranks holds.
        compression: of gradients; None: they are whole.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        watch: StorageWatch,
        experts: set[nn.Parameter],
        compression: DryCompression | None = None,
    ) -> None:
        self.root, self.compression = root, None
        self._compression, self._reducing = compression, False
        self._buckets: list[tuple[list[nn.Parameter], list[Tensor]]] = []
        self._missing: list[set[nn.Parameter]] = []  # of each bucket, whose gradients are not complete
        self._sent = 0  # buckets
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
        missing = set(held)
        for value in held if self._compression is not None else ():
            value.register_post_accumulate_grad_hook(lambda value: self._count(missing, value))
        self._missing.append(missing)

    def _count(self, missing: set[nn.Parameter], value: nn.Parameter) -> None:
        """The gradient of a parameter is complete; buckets are sent in their order."""
        if self._reducing:
            missing.discard(value)
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._send()

    def _send(self) -> None:
        held, parts = self._buckets[self._sent]
        self._sent += 1
        if self._compression is not None:
            self._compression.exchange(list(zip(held, parts, strict=True)), used=len(held))

    def before_backward(self, *, last: bool) -> None:
        """Whether the next backward is the last one of the step."""
        self._reducing = last

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
        while self._sent < len(self._buckets):
            self._send()
        if self._compression is not None:
            self._compression.finish()
        for held, parts in self._buckets:
            for value, part in zip(held, parts, strict=True):
                if value.grad is not None:
                    value.grad = part


# ---- outer steps ----


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
