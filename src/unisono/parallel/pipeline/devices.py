"""A pipeline over the devices of one process: an `nn.Sequential` whose children are on several devices.

Children on one device are a stage. On real GPUs one thread runs the cells of all stages, because kernels run
by themselves. Elsewhere each stage has a thread.

    forward     rows, parameters -> all cells forward -> token -> outputs
    backward    gradients of these <- all cells backward <- token <- their gradients

The arrows to and from the token are functions of the caller's graph. The token is on the CPU, so the cells'
backward begins in the thread that called backward: autograd's threads of the devices stay free for the cells.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.engine.base.validation import one_of, whole
from unisono.errors import UnfitError
from unisono.parallel.graph.containers import join_rows, mapped, tensors_in
from unisono.parallel.structure import is_chain

from .cells import PipeRun, PipeStage
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


class Pipe(nn.Sequential):
    """Run an `nn.Sequential` as a pipeline over the devices of its children, in one process.

    The batch is cut into micro-batches along dimension 0, and several stages compute at the same time.
    Outputs and gradients are those of the plain `nn.Sequential` with the same micro-batches. It has the same
    children and parameters, under the same names.

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
        UnfitError: parameters of one child are on several devices; `to`, `cuda` or `cpu` would move the
            stages.
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
        self._checkpoint = one_of(checkpoint, "Pipe: checkpoint", KEPT)
        self._schedule = one_of(schedule, "Pipe: schedule", SCHEDULES)
        if deferred_batch_norm:
            raise ValueError(
                "Pipe: deferred_batch_norm=True is not offered; BatchNorm counts each micro-batch"
            )
        self._balance = None if balance is None else [whole(count, "balance", 1) for count in balance]
        self._spans: list[Span] = []
        if not is_chain(module):
            raise TypeError(
                f"Pipe: module is a {type(module).__name__} of {len([*module.children()])} children, "
                "expected a plain nn.Sequential, without hooks, parameters or buffers beside those of its "
                "children. Give them to a child; register hooks on the Pipe"
            )
        for name, child in module._modules.items():
            if hasattr(self, name):
                raise ValueError(f'Pipe: a child is called "{name}", as an attribute of Pipe is. Rename it')
            self.add_module(name, child)
        self.training = module.training
        self._stages()

    def forward(self, *inputs: Any, target: Any = None, loss: Loss | None = None) -> PipeOutput:  # type: ignore[override]
        """Run the micro-batches and join their outputs along dimension 0.

        With `loss` the backward of a micro-batch follows `schedule`, and may begin before the last forward.
        The value is then the mean loss over the rows; its `backward()` adds the gradients to the parameters.

        Args:
            inputs: of the first child. Tensors are cut along dimension 0, also in tuples, lists and dicts.
                Every micro-batch gets a tensor without dimensions, and any other value, whole.
            target: cut like the inputs.
            loss: of (output, target) of a micro-batch; returns the mean over its rows.
        Raises:
            ValueError: tensors with different numbers of rows, also of an output without `loss`; a schedule
                that needs `loss`.
            TypeError: no tensor with rows; micro-batches with different outputs that are no tensors.
        """
        sizes = _sizes((inputs, target), self._chunks)
        rows, kept, losses = sum(sizes), KEPT[self._checkpoint], []
        if loss is not None:
            shares = (size / rows if rows else 1 / len(sizes) for size in sizes)
            losses = [partial(_share, loss, *one) for one in zip(_cut(target, sizes), shares, strict=True)]
        stages = self._stages()
        run = PipeRun(
            stages,
            _actions(self._schedule, len(stages), len(sizes)),
            _cut(inputs, sizes),
            losses,
            again=len(sizes) - kept if self.training and kept is not None else 0,
        )
        if run.grad and loss is None and self._schedule != "gpipe":
            raise ValueError(
                f"Pipe: schedule={self._schedule!r} begins with backward before the last forward, and needs "
                "the loss: pipe(x, target=y, loss=function).local_value().backward()"
            )
        self._spans = run.spans
        output = run.forward()
        return PipeOutput(_joined(output, sizes) if loss is None else output)

    def timeline(self) -> Timeline:
        """When the last call ran each cell, forward and backward, by the host's clock."""
        spans = [*self._spans]
        return Timeline(self._schedule, 1 + max((span.rank for span in spans), default=0), spans)

    def __getitem__(self, index: Any) -> Any:
        """A child; of a slice an `nn.Sequential`."""
        return nn.Sequential(OrderedDict(self._modules))[index]  # type: ignore[arg-type]

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipe:
        places = {tensor.device for tensor in (*self.parameters(), *self.buffers())}
        if len(places) > 1 and any(function(torch.empty(0, device=here)).device != here for here in places):
            raise UnfitError(
                f"Pipe: its children are on {', '.join(sorted(map(str, places)))}, and would all move to one "
                "device. Move them one by one: pipe[0].to(...)"
            )
        super()._apply(function, recurse)
        return self

    def _stages(self) -> list[PipeStage]:
        """The stages as the children are now."""
        children = dict(self.named_children())
        if not children or len(children) != len(self):
            raise ValueError(
                f"Pipe: {len(self)} children, {len(children)} different ones; expected each one once"
            )
        places = {name: _device_of(name, child) for name, child in children.items()}
        counts = _by_device([*places.values()]) if self._balance is None else self._balance
        if sum(counts) != len(children):
            raise ValueError(
                f"Pipe: balance={counts} counts {sum(counts)} children, and there are {len(children)}"
            )
        stages, names, homes = [], iter(children), dict[nn.Module, int]()
        for number, count in enumerate(counts):
            own = [*itertools.islice(names, count)]
            here = dict.fromkeys(places[name] for name in own if places[name] is not None)
            if len(here) > 1:
                raise UnfitError(
                    f"Pipe: balance gives stage {number} children on {', '.join(map(str, here))}"
                )
            parts = nn.ModuleList(children[name] for name in own)
            for module in parts.modules():
                if homes.setdefault(module, number) != number and module._buffers:
                    raise UnfitError(
                        f"Pipe: stages {homes[module]} and {number} have the same {type(module).__name__}, "
                        "which has buffers: what is in them would depend on timing. Use two"
                    )
            stages.append(PipeStage(number, own, parts, next(iter(here), None)))
        return stages


def _device_of(name: str, child: nn.Module) -> torch.device | None:
    """Where the parameters of a child are, or its buffers; None: it has none."""
    devices = {p.device for p in child.parameters()} or {b.device for b in child.buffers()}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise UnfitError(f'Pipe: child "{name}" has parameters on {places}; a child runs on one device')
    return next(iter(devices), None)


def _by_device(places: list[torch.device | None]) -> list[int]:
    """Children of each stage, one beginning where the device changes. Example: 0 None 0 1 -> [3, 1]."""
    counts, device = [0], None
    for place in places:
        if place is not None and device not in (None, place):
            counts.append(0)
        counts[-1] += 1
        device = place or device
    return counts


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


def _sizes(given: Any, chunks: int) -> list[int]:
    """The rows of each micro-batch."""
    found = {len(tensor) for tensor in tensors_in(given) if tensor.dim()}
    if not found:
        raise TypeError("Pipe: the inputs have no tensor with rows; dimension 0 is cut into micro-batches")
    if len(found) > 1:
        raise ValueError(f"Pipe: tensors with {sorted(found)} rows; all need as many in dimension 0")
    return [len(part) for part in torch.empty(found.pop(), 0, device="cpu").chunk(chunks)]


def _cut(given: Any, sizes: list[int]) -> list[Any]:
    """The micro-batches of inputs or targets."""
    parts = [tensor.split(sizes) if tensor.dim() else [tensor] * len(sizes) for tensor in tensors_in(given)]
    micros = [iter(own) for own in zip(*parts, strict=True)] or [iter(())] * len(sizes)
    return [mapped(given, lambda _: next(own)) for own in micros]  # noqa: B023


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
    return join_rows(outputs, sizes, repeated=True)
