"""Parameters that every data rank holds whole (ZeRO 0): gradients are averaged bucket by bucket.

A bucket is one flat buffer. It is reduced in the background as soon as backward has filled it, in the order
of buckets, which is the same on all ranks. Source: Li et al., PyTorch Distributed, VLDB 2020.

    bucket | gradient of the last parameter | ... | of the first one | used: a number for each of them |

`used` says on which share of the ranks backward came to the parameter. A gradient that only some ranks have
is an error: otherwise their parameters would silently drift apart.

Under `Plan(compression=...)` compression/ averages a bucket's gradients in fewer bytes, and `used` exactly.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from unisono.torch_internals.training import copy_each_

from .compression.reducer import Compression
from .experts.layers import ExpertAxis
from .gradients import gradient, local
from .mesh import PlanMesh

BUCKET_BYTES = 25 << 20  # DDP's; the last one, with the first layers, may be smaller


class GradientBucket:
    """Some parameters of one dtype, and one buffer for all their gradients."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], number: int, group: dist.ProcessGroup, of: str = ""
    ) -> None:
        self.group, self._label = group, f"{of}bucket {number}"
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.mine = b""  # whether this rank has a gradient of each
        self.missing = set(self.parameters)  # not reached by backward yet; it may reach one twice
        self.reducing = False
        self.work: Any = None  # of the all-reduce; none under compression
        locals_ = [local(parameter) for parameter in self.parameters]
        sizes = [part.numel() for part in locals_]
        like = locals_[0]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *parts, self._used = self._flat.split([*sizes, len(sizes)])
        self._parts = [part.view(one.shape) for part, one in zip(parts, locals_, strict=True)]

    def reduce(self, compression: Compression | None = None) -> None:
        """Begin to average over the ranks of the group. A parameter without a gradient counts as zero."""
        self.reducing = True
        self.fill()
        if compression is not None:
            unused = {one for one, mine in zip(self.parameters, self.mine, strict=True) if not mine}
            options: Any = {"label": self._label, "exact": [self._used], "unused": unused}
            compression.begin(self.parts(), self._flat, **options)
            return
        with record_function(f"up::gradients|{self._label}"):
            self.work = dist.all_reduce(self._flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)

    def fill(self) -> None:
        """Copy this rank's gradients into the buffer."""
        pairs = [(part, gradient(parameter)) for parameter, part in self.parts()]
        with_gradient = [(part, grad) for part, grad in pairs if grad is not None]
        for part, grad in pairs:
            if grad is None:
                part.zero_()
        self.mine = bytes(grad is not None for _, grad in pairs)
        self._used.copy_(torch.tensor([*self.mine], dtype=torch.float32))
        if with_gradient:
            copy_each_([part for part, _ in with_gradient], [grad for _, grad in with_gradient])

    def parts(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of the buffer."""
        return list(zip(self.parameters, self._parts, strict=True))

    def wait(self) -> None:
        """Wait for the averages, if they are being made; be ready for the next ones."""
        work, self.work, self.reducing = self.work, None, False
        self.missing = set(self.parameters)
        if work is not None:
            work.wait()

    def forget(self) -> None:
        """Wait for the operation under way, whatever becomes of it; be ready for the next one."""
        with contextlib.suppress(RuntimeError):  # the step has raised an error already
            self.wait()

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Record that backward has added to the gradient of `parameter`."""
        if self.reducing:
            name = next(n for n, one in zip(self.names, self.parameters, strict=True) if one is parameter)
            raise RuntimeError(
                f"backward came to {name!r} again after its gradient went to the other ranks. A layer that "
                "is used more than once under torch.utils.checkpoint does so: write "
                "checkpoint(..., use_reentrant=False)"
            )
        self.missing.discard(parameter)

    def finish_step(self, *, uneven_use: bool) -> None:
        """Store the averages in the gradients of the parameters that this rank has used, or of all."""
        for parameter, part, mine in zip(self.parameters, self._parts, self.mine, strict=True):
            wanted = mine or (uneven_use and parameter.requires_grad)
            parameter.grad = like(part, parameter) if wanted else None

    def unused(self) -> list[nn.Parameter]:
        """The parameters that no rank has used. It waits for the device."""
        return [one for one, used in zip(self.parameters, self._used.tolist(), strict=True) if not used]

    def check_used(self) -> None:
        """Raise RuntimeError if only some ranks have used a parameter. It waits for the device."""
        for name, used in zip(self.names, self._used.real.tolist(), strict=True):
            if 0 < used < 1:
                raise RuntimeError(
                    f"{name!r} has a gradient on {used:.0%} of the data ranks only. If ranks may leave "
                    "different parameters unused, write Plan(uneven_use=True)"
                )


def mark_of(buckets: Iterable[GradientBucket]) -> int:
    """A number below 2^20 for which parameters this rank has used."""
    return zlib.crc32(b"".join(bucket.mine for bucket in buckets)) % 2**20


class ReplicatedParameters:
    """The data axis under ZeRO 0, for parameters whose type is that of the computation.

    Args:
        experts: whose parameters fewer ranks hold; None: there are none.
    Attributes:
        root: the module whose parameters these are.
        compression: how gradients are compressed; None: not.
        buckets: one after the other, as backward fills them.
    """

    def __init__(self, root: nn.Module, mesh: PlanMesh, experts: ExpertAxis | None = None) -> None:
        self.root, self._experts = root, experts
        self.compression: Compression | None = None
        self._uneven_use = mesh.plan.uneven_use
        self.buckets: list[GradientBucket] = []
        self._next = 0  # the first bucket that is not being reduced
        self._reducing = self._strayed = False
        self._hooks: list[Any] = []
        self.follow(mesh)

    def follow(self, mesh: PlanMesh) -> None:
        """Average over the data ranks of this mesh from now on."""
        self._group, self._plan, self._mesh = mesh.group("replica"), mesh.plan, mesh
        for bucket in self.buckets:
            bucket.group = self._group
        if self.buckets:
            return
        self.buckets = buckets_of(self.root, mesh, self._experts)
        counter = weakref.WeakMethod(self._count)  # hooks of a parameter are not garbage-collected with it
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(call_alive, counter, number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        ]

    def shown(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield nothing: the model shows the parameters themselves."""
        return iter(())

    def follow_frozen(self) -> None:
        """Average the gradients of those parameters that require them now."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.buckets = [], []
        self.follow(self._mesh)

    def compress(self, named: Mapping[str, nn.Parameter]) -> None:
        """Compress gradients as the plan says. `named`: the parameters by their names in the user's model."""
        settings = self._plan.compression
        if settings is not None and self.buckets:
            self.compression = Compression(settings, named, self._group)

    def reset(self) -> None:
        """Clean up after a step that ended with an error: wait for its operations under way."""
        self._reducing = False
        self._next = 0
        if self.compression is not None:
            self.compression.reset()
        for bucket in self.buckets:
            bucket.forget()

    def waiting(self) -> list[Any]:
        """Nothing: gradients wait in their parameters."""
        return []

    def strayed(self) -> bool:
        """Whether a backward has come since `finish` whose gradients are those of this rank alone."""
        return self._strayed and any(p.grad is not None for one in self.buckets for p in one.parameters)

    def before_backward(self, *, last: bool) -> None:
        """Say whether the next backward is the last one of this step."""
        self._reducing = last

    def after_weights(self) -> None:
        """Nothing: gradients of f32 parameters add up in f32."""

    def reduce_now(self) -> None:
        """`finish` does it."""

    def finish(self) -> None:
        """Reduce what no backward has filled, and wait for all."""
        self._reducing = self._strayed = False
        for bucket in self.buckets[self._next :]:
            bucket.reduce(self.compression)
        self._next = 0
        if self.compression is not None:
            self.compression.finish()
        for bucket in self.buckets:
            bucket.wait()
        for bucket in self.buckets:
            if self.compression is not None and not self._uneven_use:
                self.compression.settle(undo=True, of=bucket.unused())
            bucket.finish_step(uneven_use=self._uneven_use)

    def _count(self, number: int, parameter: nn.Parameter) -> None:
        """The gradient of `parameter`, one of a bucket's, is complete."""
        if not self._reducing:
            self._strayed = True
            return
        self.buckets[number].mark_ready(parameter)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].reduce(self.compression)
            self._next += 1


def call_alive(method: weakref.WeakMethod[Any], *args: Any) -> None:
    """Call a method of an object that is still there: a hook that keeps nothing alive."""
    alive = method()
    if alive is not None:
        alive(*args)


def buckets_of(
    root: nn.Module,
    mesh: PlanMesh,
    experts: ExpertAxis | None,
    leave: Iterable[nn.Parameter] = (),
    axis: str = "replica",
) -> list[GradientBucket]:
    """The buckets of what `root` trains; those of experts are averaged over the ranks that hold them.

    Args:
        experts: whose parameters fewer ranks hold; None: there are none.
        leave: parameters that are in no bucket.
        axis: over whose ranks they are averaged.
    """
    if mesh.plan.copies == 1:
        return []
    left, held = set(leave), set() if experts is None else experts.parameters()
    named = [(name, value) for name, value in root.named_parameters() if value not in left]
    trained = [(name, value) for name, value in named if value.requires_grad]
    kinds = [(mesh.group(axis), [pair for pair in trained if pair[1] not in held], "")]
    if experts is not None and experts.mesh.plan.data > 1:
        kinds.append((experts.mesh.group(axis), [pair for pair in trained if pair[1] in held], "experts, "))
    found: list[GradientBucket] = []
    for group, some, of in kinds:
        for indices in bucket_indices([value for _, value in some], backward=True):  # as backward comes to it
            found.append(GradientBucket([some[index] for index in indices], len(found), group, of))
    return found


def bucket_indices(values: Sequence[Tensor], *, backward: bool = False) -> Iterator[list[int]]:
    """Yield the tensors of each bucket, of one type and device, in their order; backward: the last first."""
    kinds: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        kinds.setdefault((value.dtype, value.device), []).append(index)
    for indices in kinds.values():
        held, nbytes = [], 0
        for index in reversed(indices) if backward else indices:
            held.append(index)
            nbytes += local(values[index]).nbytes
            if nbytes >= BUCKET_BYTES:
                yield held
                held, nbytes = [], 0
        if held:
            yield held


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return `part`, this rank's part of something, as a tensor that is cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
