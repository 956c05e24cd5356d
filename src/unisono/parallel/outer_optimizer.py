"""Meetings of replicas that train on their own: local SGD and DiLoCo, under Plan(local_steps=...).

Each rank keeps an anchor of its parameters: their values after the last meeting, the same on all replicas. At
a meeting the replicas average how far each has moved, and one step of SGD takes the anchor along the mean:

    d = mean over replicas of (anchor - parameters);  anchor = SGD(anchor, gradient=d);  parameters = anchor

A meeting sends the bytes of one averaged gradient, once in `local_steps` steps. It also averages the buffers
of a model, such as BatchNorm's statistics. The moments of the replicas' own optimizers stay their own.
Sources: see `OuterSGD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from .compression.reducer import Compression
from .gradients import local, wide_copy
from .mesh import PlanMesh
from .model_buffers import ModelBuffers
from .replicated_parameters import bucket_indices, like

MOMENTUM = "momentum_buffer"  # its key in SGD's state


class DifferenceBucket:
    """Some parameters whose anchors have one type and device, and one buffer for how far they have moved."""

    def __init__(self, parameters: list[Tensor], anchors: list[nn.Parameter], number: int) -> None:
        self.parameters, self.anchors, self.number = parameters, anchors, number
        self._flat = anchors[0].data.new_empty(sum(anchor.numel() for anchor in anchors))
        parts = self._flat.split([anchor.numel() for anchor in anchors])
        self.parts = [part.view(anchor.shape) for part, anchor in zip(parts, anchors, strict=True)]
        self._work: Any = None

    def begin(self, group: dist.ProcessGroup, compression: Compression | None) -> None:
        """Begin to average the differences over the replicas."""
        self.fill()
        label = f"bucket {self.number}"
        if compression is not None:
            compression.begin(list(zip(self.parameters, self.parts, strict=True)), self._flat, label=label)
            return
        with record_function(f"up::meeting|{label}"):
            self._work = dist.all_reduce(self._flat, op=dist.ReduceOp.AVG, group=group, async_op=True)

    def fill(self) -> None:
        """Take how far the parameters of this rank have moved."""
        for part, anchor, parameter in zip(self.parts, self.anchors, self.parameters, strict=True):
            torch.sub(anchor, local(parameter), out=part)

    def finish(self) -> None:
        """Wait for the averages; they are the gradients of the anchors then."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        for part, anchor in zip(self.parts, self.anchors, strict=True):
            anchor.grad = part

    def reset(self) -> None:
        """Forget a meeting that ended with an error."""
        self._work = None


class OuterOptimizer:
    """The meetings of this rank with the same ranks of other replicas.

    Args:
        trained: this rank's parameters by name; the same on all replicas now.
        buffers: of the model, to be averaged over all replicas.
        mesh: of one replica.
    Attributes:
        compression: how differences are compressed; None: not.
        sgd: steps the anchors; None: nothing is trained.
    """

    def __init__(self, trained: Mapping[str, Tensor], buffers: ModelBuffers, mesh: PlanMesh) -> None:
        plan, sgd = mesh.everyone.plan, mesh.everyone.plan.outer_sgd
        self._every = plan.local_steps or 1
        self._group, self._buffers = mesh.everyone.group("replica"), buffers
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._anchors = [nn.Parameter(wide_copy(parameter)) for parameter in self._parameters]
        self._buckets = [
            DifferenceBucket([self._parameters[i] for i in held], [self._anchors[i] for i in held], number)
            for number, held in enumerate(bucket_indices(self._anchors))
        ]
        options: Any = {"momentum": sgd.momentum, "nesterov": sgd.nesterov and sgd.momentum > 0}
        self.sgd = torch.optim.SGD(self._anchors, lr=sgd.rate, **options) if self._anchors else None
        self.compression: Compression | None = None
        if plan.compression is not None and self._anchors:
            self.compression = Compression(plan.compression, trained, self._group)

    def due(self, steps: int) -> bool:
        """Whether the replicas meet after so many steps."""
        return steps % self._every == 0

    def next_meeting(self, steps: int) -> int:
        """The number of the step that ends with the next meeting, after so many steps."""
        return (steps // self._every + 1) * self._every

    def meetings(self, steps: int) -> int:
        """How many there are in so many steps."""
        return steps // self._every

    @torch.no_grad()
    def meet(self) -> None:
        """Exchange the differences, step, and give the parameters the new values. All ranks call this."""
        try:
            self._exchange()
        except BaseException:
            if self.compression is not None:
                self.compression.reset()
            for bucket in self._buckets:
                bucket.reset()
            raise
        if self.sgd is not None:
            self.sgd.step()
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            anchor.grad = None
            local(parameter).copy_(anchor)
        self._buffers.synchronize(self._buffers.changed())

    def _exchange(self) -> None:
        for bucket in self._buckets:
            bucket.begin(self._group, self.compression)
        if self.compression is not None:
            self.compression.finish()
        for bucket in self._buckets:
            bucket.finish()

    # ---- what is saved: the anchors are the parameters at a meeting ----

    def tensors(self) -> dict[str, Tensor]:
        """The momentum of each parameter, cut as the parameter is; zeros before the first meeting."""
        if self.sgd is None or not self.sgd.defaults["momentum"]:
            return {}
        return {
            f"outer.{name}": like(
                self.sgd.state[anchor].get(MOMENTUM, torch.zeros_like(anchor.data)), parameter
            )
            for name, anchor, parameter in zip(self._names, self._anchors, self._parameters, strict=True)
        }

    @torch.no_grad()
    def load(self, found: Mapping[str, Tensor]) -> None:
        """Begin at the parameters as they are now, with these momenta; the parameters without one, anew."""
        for name, anchor, parameter in zip(self._names, self._anchors, self._parameters, strict=True):
            anchor.copy_(local(parameter))
            momentum = found.get(f"outer.{name}")
            if self.sgd is not None and momentum is None:
                self.sgd.state.pop(anchor, None)
            elif self.sgd is not None:
                self.sgd.state[anchor][MOMENTUM] = local(momentum).to(anchor.dtype)  # type: ignore[arg-type]
        self._buffers.note()
