"""A pipeline over the devices of one process: an `nn.Sequential` whose children are on several devices.

Children on one device are a stage. On real GPUs one thread runs the cells of all stages, because kernels run
by themselves. Elsewhere each stage has a thread.

    forward     rows, parameters -> _PipeStart: all cells forward -> token -> _PipeEnd -> outputs
    backward    gradients of these <- _PipeStart: all cells backward <- token <- _PipeEnd <- their gradients

The token is on the CPU, so `_PipeStart` runs in the thread that called backward: autograd's threads of the
devices stay free for the cells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.engine.base.validation import whole
from unisono.errors import UnfitError
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.fused import has_hooks

from .cells import FREED, PipeRun, PipeStage
from .schedule import Action, Schedule, Span, Timeline, prove, schedule

SCHEDULES = ("gpipe", "1f1b")
KEPT = {"always": 0, "except_last": 1, "never": None}  # the last micro-batches that are not computed again
Loss = Callable[[Any, Any], Tensor]


@dataclass
class PipeOutput:
    """What a `Pipe` returns, in place of the reference to another process that PyTorch's had."""

    value: Any

    def local_value(self) -> Any:
        """The output, on the last stage's device."""
        return self.value


class Pipe(nn.Module):
    """Run an `nn.Sequential` as a pipeline over the devices of its children, in one process.

    The batch is cut into micro-batches along dimension 0, and several stages compute at the same time.
    Outputs and gradients are those of the plain `nn.Sequential` with the same micro-batches. It has the same
    parameters, under the same names.

        model = up.Pipe(nn.Sequential(first.to("cuda:0"), second.to("cuda:1")), chunks=8)
        loss = functional.cross_entropy(model(x).local_value(), y)
        loss.backward()

    Cost: with m micro-batches on p stages of equal times, each waits (p-1)/(m+p-1) of the step.
    Source: GPipe, arXiv:1811.06965; torchgpipe, arXiv:2004.09910.

    Args:
        module: consecutive children on one device are a stage. A child without parameters belongs to the
            stage of the one before it.
        chunks: micro-batches, as `torch.chunk` cuts them; a small batch has fewer.
        checkpoint: which micro-batches are computed again in backward and keep only the inputs of stages
            meanwhile: "always", "except_last" or "never".
        deferred_batch_norm: False: BatchNorm counts each micro-batch. True is refused.
        balance: children of each stage, also of stages on one device, such as threads on the CPU: [2, 3].
        schedule: "gpipe"; or "1f1b", which holds fewer micro-batches and needs `loss=` in the call.
    Raises:
        TypeError, ValueError: arguments that do not fit the module.
        UnfitError: parameters of one child are on several devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: Sequence[int] | None = None,
        schedule: str = "gpipe",
    ) -> None:
        super().__init__()
        self._chunks = whole(chunks, "chunks", 1)
        self._checkpoint, self._schedule = checkpoint, schedule
        for name, value, known in (("checkpoint", checkpoint, KEPT), ("schedule", schedule, SCHEDULES)):
            if value not in tuple(known):
                raise ValueError(f"Pipe: {name}={value!r}, expected one of {', '.join(map(repr, known))}")
        if deferred_batch_norm:
            raise ValueError(
                "Pipe: deferred_batch_norm=True is not offered; BatchNorm counts each micro-batch"
            )
        self._balance = None if balance is None else [whole(count, "balance", 1) for count in balance]
        self._spans: list[Span] = []
        _check(module)
        for name, child in module.named_children():
            if hasattr(self, name):
                raise ValueError(f'Pipe: a child is called "{name}", as an attribute of Pipe is. Rename it')
            self.add_module(name, child)
        self.training = module.training
        self._stages()

    def forward(self, *inputs: Any, target: Any = None, loss: Loss | None = None) -> PipeOutput:
        """Run the micro-batches and join their outputs along dimension 0.

        With `loss` the backward of a micro-batch follows `schedule`, and may begin before the last forward.
        The value is then the mean loss over the rows; its `backward()` adds the gradients to the parameters.

        Args:
            inputs: of the first child. Tensors are cut along dimension 0, also in tuples, lists and dicts.
                Every micro-batch gets a tensor without dimensions, and any other value, whole.
            target: cut like the inputs.
            loss: of (output, target) of a micro-batch; returns the mean over its rows.
        Raises:
            ValueError: tensors with different numbers of rows; a schedule that needs `loss`.
            TypeError: no tensor with rows; outputs that cannot be joined.
        """
        rows = _rows((inputs, target))
        micros, targets = _cut(inputs, self._chunks, rows), _cut(target, self._chunks, rows)
        sizes = [len(part) for part in torch.empty(rows, 0, device="cpu").chunk(self._chunks)]
        stages = self._stages()
        trained = list(dict.fromkeys(parameter for stage in stages for parameter in stage.trained()))
        tensors = [*tensors_in(micros), *trained]
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if grad and loss is None and self._schedule != "gpipe":
            raise ValueError(
                f"Pipe: schedule={self._schedule!r} begins with backward before the last forward, and needs "
                "the loss: pipe(x, target=y, loss=function).local_value().backward()"
            )
        kept = KEPT[self._checkpoint]
        again = len(micros) - kept if grad and self.training and kept is not None else 0
        run = PipeRun(
            stages, _actions(self._schedule, len(stages), len(micros)), micros, grad=grad, again=again
        )
        self._spans = run.spans
        if loss is not None:
            shares = (size / rows if rows else 1 / len(sizes) for size in sizes)
            run.losses = [partial(_share, loss, *one) for one in zip(targets, shares, strict=True)]
            value = _PipeLoss.apply(run, trained, *tensors) if grad else sum(run.forward())
            return PipeOutput(value)
        if grad:
            token = _PipeStart.apply(run, trained, *tensors)
            outputs = run.take_outputs()
            flat = iter(_PipeEnd.apply(run, token, [[*tensors_in(one)] for one in outputs]))
            outputs = [mapped(one, lambda _: next(flat)) for one in outputs]
        else:
            outputs = run.forward()
        return PipeOutput(_joined(outputs, sizes))

    def timeline(self) -> Timeline:
        """When the last call ran each cell, forward and backward, by the host's clock."""
        spans = [*self._spans]
        return Timeline(self._schedule, 1 + max((span.rank for span in spans), default=0), spans)

    def _stages(self) -> list[PipeStage]:
        """The stages as the children are now."""
        places = {name: _device_of(name, child) for name, child in self.named_children()}
        names, devices = _by_device(places) if self._balance is None else _by_number(places, self._balance)
        return [
            PipeStage(number, {name: self.get_submodule(name) for name in group}, device)
            for number, (group, device) in enumerate(zip(names, devices, strict=True))
        ]


def _check(module: nn.Sequential) -> None:
    """Raise for what a Pipe of the children would lose."""
    kind: Any = type(module)
    if not issubclass(kind, nn.Sequential) or kind.forward is not nn.Sequential.forward:
        raise TypeError(f"Pipe: module is a {kind.__name__}, expected a plain nn.Sequential")
    children = dict(module.named_children())
    if not children or len(children) != len(module):
        raise ValueError(
            f"Pipe: {len(module)} children, {len(children)} different ones; expected each one once"
        )
    if module._parameters or module._buffers or has_hooks(module):
        raise ValueError(
            "Pipe: the nn.Sequential has hooks, parameters or buffers beside those of its children. Give"
            " them to a child; register hooks on the Pipe"
        )


def _device_of(name: str, child: nn.Module) -> torch.device | None:
    """Where the parameters of a child are, or its buffers; None: it has none."""
    devices = {p.device for p in child.parameters()} or {b.device for b in child.buffers()}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise UnfitError(f'Pipe: child "{name}" has parameters on {places}; a child runs on one device')
    return next(iter(devices), None)


Groups = tuple[list[list[str]], list[torch.device | None]]  # the children of each stage, its device


def _by_device(places: dict[str, torch.device | None]) -> Groups:
    """A stage begins where the device changes. Example: 0 - 0 1 -> [0 - 0] [1]; - is without a device."""
    groups: list[list[str]] = []
    devices: list[torch.device | None] = []
    for name, device in places.items():
        if not groups or (device is not None and devices[-1] not in (None, device)):
            groups.append([])
            devices.append(device)
        groups[-1].append(name)
        devices[-1] = devices[-1] or device
    return groups, devices


def _by_number(places: dict[str, torch.device | None], balance: Sequence[int]) -> Groups:
    """Stages of so many children. Example: balance 1 2 -> [0] [1 2]."""
    if sum(balance) != len(places):
        raise ValueError(
            f"Pipe: balance={balance} counts {sum(balance)} children, and there are {len(places)}"
        )
    names = iter(places)
    groups = [list(itertools.islice(names, count)) for count in balance]
    devices: list[torch.device | None] = []
    for number, group in enumerate(groups):
        here = {places[name] for name in group} - {None}
        if len(here) > 1:
            raise UnfitError(f"Pipe: balance gives stage {number} children on {', '.join(map(str, here))}")
        devices.append(next(iter(here), None))
    return groups, devices


@functools.lru_cache
def _actions(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule, proved. GPipe's last micro-batch goes backward first: its activations are there."""
    made = schedule(name, stages, micro_batches)
    if name == "gpipe":
        forwards = ([action for action in order if action.kind == "F"] for order in made.orders)
        orders = ((*own, *(Action("B", *action[1:]) for action in reversed(own))) for own in forwards)
        made = Schedule(name, tuple(orders), made.rank_of, micro_batches)
    prove(made)
    return made


# ---- the batch ----


def _rows(given: Any) -> int:
    """How many rows the tensors of a batch have."""
    found = {len(tensor) for tensor in tensors_in(given) if tensor.dim()}
    if not found:
        raise TypeError("Pipe: the inputs have no tensor with rows; dimension 0 is cut into micro-batches")
    if len(found) > 1:
        raise ValueError(f"Pipe: tensors with {sorted(found)} rows; all need as many in dimension 0")
    return found.pop()


def _cut(given: Any, chunks: int, rows: int) -> list[Any]:
    """The micro-batches of inputs or targets."""
    count = len(torch.empty(rows, 0, device="cpu").chunk(chunks))
    parts = [[*t.chunk(chunks)] if t.dim() else [t] * count for t in tensors_in(given)]

    def micro(number: int) -> Any:
        own = iter(parts)
        return mapped(given, lambda _: next(own)[number])

    return [micro(number) for number in range(count)]


def _share(loss: Loss, target: Any, share: float, output: Any, device: torch.device | None) -> Tensor:
    """What a micro-batch adds to the mean loss of the batch. device: of the last stage."""
    value: Any = loss(output, target if device is None else mapped(target, lambda tensor: tensor.to(device)))
    if not isinstance(value, Tensor) or value.dim():
        what = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"Pipe: loss returned {what}, expected a tensor without dimensions: the mean over the rows"
        )
    return value * share


def _joined(outputs: list[Any], sizes: list[int]) -> Any:
    """The output of the batch."""
    plain = [mapped(one, lambda _: None) for one in outputs]
    if any(one != plain[0] for one in plain):
        raise TypeError(f"Pipe: micro-batches returned different values that are no tensors: {plain}")
    for one, size in zip(outputs, sizes, strict=True):
        for tensor in tensors_in(one):
            if not tensor.dim() or (size and len(tensor) % size):
                raise TypeError(
                    f"Pipe: {size} rows gave a tensor of shape {[*tensor.shape]}, which cannot be joined "
                    "with those of other micro-batches: dimension 0 has to be the rows. Or write loss="
                )
    columns = zip(*(tensors_in(one) for one in outputs), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return mapped(outputs[0], lambda _: next(joined))


# ---- in the caller's graph ----


class _PipeStart(torch.autograd.Function):
    """Runs all cells forward, and in backward all cells backward."""

    @staticmethod
    def forward(ctx: Any, run: PipeRun, trained: list[nn.Parameter], *_tensors: Tensor) -> Tensor:
        ctx.run, ctx.trained = run, trained
        run.take("F")
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> Any:
        ctx.run.take("B")
        return None, None, *ctx.run.gradients(ctx.trained)


class _PipeEnd(torch.autograd.Function):
    """Returns the outputs of the micro-batches, and in backward keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, run: PipeRun, _token: Tensor, outputs: list[list[Tensor]]) -> Any:
        ctx.run, ctx.counts = run, [len(one) for one in outputs]
        ctx.set_materialize_grads(False)
        flat = [(tensor.detach(), tensor.requires_grad) for one in outputs for tensor in one]
        ctx.mark_non_differentiable(*(tensor for tensor, needed in flat if not needed))
        return tuple(tensor for tensor, _ in flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        own = iter(grads)
        ctx.run.grads = [list(itertools.islice(own, count)) for count in ctx.counts]
        return None, torch.zeros((), device="cpu"), None


class _PipeLoss(torch.autograd.Function):
    """Runs all cells forward and backward; returns the loss, and in backward its gradients."""

    @staticmethod
    def forward(ctx: Any, run: PipeRun, trained: list[nn.Parameter], *_tensors: Tensor) -> Any:
        run.take("FB")
        ctx.grads = run.gradients(trained)
        return sum(one.detach() for one in run.take_outputs())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(FREED)
        return None, None, *(None if own is None else own * grad.to(own.device) for own in grads)
