"""One run of a pipeline in one process: its cells, forward and backward, in threads or in this one.

A cell is a micro-batch on a stage. It has a graph of its own, whose leaves are its inputs and the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.generators import drawing, drawn_seed, generators_kept, seed_of
from unisono.parallel.graph.containers import mapped, strange_in, tensors_in
from unisono.parallel.model_buffers import buffers_kept
from unisono.parallel.parameter_hooks import OF_GRADIENTS
from unisono.torch_internals.training import functions_behind, hooks_of, set_hooks

from .cell_draws import CELL_DRAWS
from .schedule import Action, Schedule, Span, StageMessage, predict

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
FREED = "Pipe: backward ran already, and what it needs is freed. Call the Pipe again"


class PipeStage(NamedTuple):
    """Children that run one after the other on one device; None: they have no parameters."""

    number: int
    children: dict[str, nn.Module]
    device: torch.device | None

    def __str__(self) -> str:
        names = ", ".join(self.children)
        return f"stage {self.number} (children {names}; {self.device or 'no parameters'})"

    def run(self, value: Any) -> Any:
        """What the last child returns. The first one of the first stage takes a tuple of arguments."""
        modules = iter(self.children.values())
        if self.number == 0:
            value = next(modules)(*value)
        for module in modules:
            value = module(value)
        return value

    def modules(self) -> Iterator[nn.Module]:
        """All modules in it."""
        return itertools.chain.from_iterable(child.modules() for child in self.children.values())

    def trained(self) -> list[nn.Parameter]:
        """Its parameters that get gradients."""
        parameters = (p for child in self.children.values() for p in child.parameters() if p.requires_grad)
        return list(dict.fromkeys(parameters))


@dataclass
class _PipeCell:
    """A micro-batch after its forward through a stage. outputs: None: it is computed again in backward."""

    inputs: Any
    versions: list[int]
    outputs: list[Tensor] | None = None


class PipeRun:
    """One call of a Pipe.

    Args:
        schedule: the actions of each stage, forward and backward.
        micros: the inputs of each micro-batch.
        grad: cells keep what their backward needs.
        again: so many micro-batches are computed again in backward.
    Attributes:
        losses: of (output, device) of each micro-batch; []: outputs are what the run returns.
        grads: of the outputs of each micro-batch, for backward.
    """

    def __init__(
        self, stages: list[PipeStage], schedule: Schedule, micros: list[Any], *, grad: bool, again: int
    ) -> None:
        self._stages, self._schedule, self._micros = stages, schedule, micros
        self._trained = [stage.trained() for stage in stages]  # as they are now: functional_call changes them
        self._default = torch.get_default_device()
        self._grad, self._again, self._seed = grad, again, drawn_seed()
        self.losses: list[Callable[[Any, torch.device | None], Tensor]] = []
        self.grads: list[list[Tensor | None]] = []
        self.spans: list[Span] = []
        self._outputs: dict[int, Any] = {}
        self._cells: dict[tuple[int, int], _PipeCell] = {}
        self._sums: list[dict[Tensor, tuple[Tensor, bool]]] = [{} for _ in stages]
        self._of_rows: dict[int, list[Tensor | None]] = {}
        devices = [stage.device for stage in stages if stage.device is not None]
        gpus = [device for device in devices if device.type == "cuda"]
        self._threads = len(stages) > 1 and not (gpus and _gpus_are_real())
        self._streams = {device: torch.cuda.current_stream(device) for device in gpus}
        self._inference = torch.is_inference_mode_enabled()
        self._autocasts = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)}
            if torch.amp.is_autocast_available(kind)
        }

    def forward(self) -> list[Any]:
        """Run all cells forward; return the outputs of the micro-batches, or their losses."""
        self.take("F")
        return self.take_outputs()

    def take_outputs(self) -> list[Any]:
        """The outputs, which are not kept here: they lead to this run, which would never be freed."""
        outputs, self._outputs = self._outputs, {}
        return [outputs[micro] for micro in range(len(self._micros))]

    def take(self, kinds: str) -> None:
        """Run the actions of these kinds.

        Raises:
            RuntimeError: backward ran already. Whatever a stage raises, with a note that names the stage.
        """
        if kinds == "B" and not self._cells:
            raise RuntimeError(
                "Pipe: backward ran already, and its activations are freed. Call the Pipe again"
            )
        orders = (
            tuple(action for action in order if action.kind in kinds) for order in self._schedule.orders
        )
        part = Schedule(self._schedule.name, tuple(orders), self._schedule.rank_of, len(self._micros))
        own = self._threads and not threading.current_thread().name.startswith(
            "Dummy"
        )  # autograd's of a device
        with _hooks_off(self._stages if "B" in kinds else []), generators_kept([torch.default_generator]):
            Walk(part, self._prepare, self._act, self._where).run(threads=own)
        for device, stream in self._streams.items():
            if "B" in kinds and stream != (first := torch.cuda.default_stream(device)):
                first.wait_stream(stream)  # which autograd waits for

    def gradients(self, trained: list[nn.Parameter]) -> list[Tensor | None]:
        """Those of the tensors in the micro-batches' inputs, then those of the parameters."""
        rows = [grad for micro in range(len(self._micros)) for grad in self._of_rows[micro]]
        sums, self._sums = self._sums, []
        found: list[Tensor | None] = []
        for parameter in trained:
            parts = [own.pop(parameter)[0] for own in sums if parameter in own]
            found.append(functools.reduce(torch.add, parts) if parts else None)
        return [*rows, *found]

    def _where(self, action: Action) -> str:
        return f"{action.kind}{action.micro} of {self._stages[action.stage]}"

    def _act(self, action: Action, came: Any) -> Any:
        stage = self._stages[action.stage]
        start = time.perf_counter()
        with self._on(stage), record_function(f"up::pipe|{action}"):
            given = (self._forward if action.kind == "F" else self._backward)(stage, action.micro, came)
        self.spans.append(Span(action.stage, action, start, time.perf_counter()))
        return given

    def _prepare(self, action: Action) -> None:
        """Compute a cell again, while the gradients of its outputs are still on their way."""
        stage = self._stages[action.stage]
        if action.kind == "F" or (cell := self._cells[action.stage, action.micro]).outputs is not None:
            return
        start = time.perf_counter()
        self._check_versions(stage, cell, "was changed between forward and backward")
        with self._on(stage), buffers_kept(stage.modules()):
            cell.outputs = [*tensors_in(self._computed(stage, action.micro, cell.inputs))]
        self.spans.append(Span(action.stage, action, start, time.perf_counter()))

    def _forward(self, stage: PipeStage, micro: int, came: Any) -> Any:
        given = came if stage.number else self._micros[micro]
        inputs = mapped(given, lambda tensor: self._leaf(tensor, stage.device))
        cell = _PipeCell(inputs, [] if self._inference else self._versions(stage, inputs))
        buffers = _buffers(stage)
        output = self._computed(stage, micro, inputs)
        if self._grad and micro == 0:
            self._check_output(stage, inputs, output)
        if micro < self._again and buffers != _buffers(stage):
            raise UnfitError(
                "Pipe: a stage writes a buffer in forward, and would find it changed when it is computed "
                'again. Write checkpoint="never"'
            )
        if self._grad:
            self._cells[stage.number, micro] = cell
            if micro >= self._again:
                cell.outputs = [*tensors_in(output)]
            else:
                self._check_versions(stage, cell, "is changed in place by the stage")
        sent = mapped(output, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        if stage.number + 1 == len(self._stages):
            self._outputs[micro] = sent
        return sent

    def _backward(self, stage: PipeStage, micro: int, came: Any) -> list[Tensor | None]:
        cell = self._cells.pop((stage.number, micro))
        outputs = cell.outputs or []
        if stage.number + 1 == len(self._stages):
            came = [torch.ones_like(one) for one in outputs] if self.losses else self.grads[micro]
        pairs = [
            (output, grad.to(output.device))
            for output, grad in zip(outputs, came, strict=True)
            if grad is not None and output.requires_grad
        ]
        leaves, trained = [*tensors_in(cell.inputs)], self._trained[stage.number]
        wanted = [leaf for leaf in leaves if leaf.requires_grad] + trained
        grads: dict[Tensor, Tensor | None] = {}
        if pairs and wanted:
            ends, own = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, wanted, own, allow_unused=True)
            grads = dict(zip(wanted, found, strict=True))
        for parameter in trained:
            if (grad := grads.get(parameter)) is not None:
                self._add(self._sums[stage.number], parameter, grad)
        given = [grads.get(leaf) for leaf in leaves]
        if stage.number == 0:
            self._of_rows[micro] = [
                None if grad is None else grad.to(tensor.device)
                for grad, tensor in zip(given, tensors_in(self._micros[micro]), strict=True)
            ]
        return given

    def _add(self, sums: dict[Tensor, tuple[Tensor, bool]], parameter: Tensor, grad: Tensor) -> None:
        """Add to a sum. The first gradient may be the memory of another one; a sum is written in place."""
        before, own = sums.get(parameter, (grad, False))
        if parameter in sums:
            before = before.add_(grad) if own else before + grad
        sums[parameter] = before, parameter in sums

    def _leaf(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        moved = tensor.detach() if device is None else tensor.detach().to(device, non_blocking=True)
        return moved.requires_grad_(self._grad and tensor.requires_grad)

    def _computed(self, stage: PipeStage, micro: int, inputs: Any) -> Any:
        """What the stage returns, or the loss of it, as in the caller's thread."""
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._default:
                stack.enter_context(self._default)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, (dtype, enabled) in self._autocasts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self._seed is not None:
                seed = seed_of(self._seed, stage.number, micro)
                kind = "cpu" if stage.device is None else stage.device.type
                stack.enter_context(CELL_DRAWS.of(seed) if self._threads else drawing(seed, kind))
            output = stage.run(inputs)
            if self.losses and stage.number + 1 == len(self._stages):
                output = self.losses[micro](output, stage.device)
            return output

    def _versions(self, stage: PipeStage, inputs: Any) -> list[int]:
        """What a cell depends on: its inputs and parameters as they are, and the mode of its modules."""
        tensors = [tensor._version for tensor in (*tensors_in(inputs), *self._trained[stage.number])]
        return tensors + [module.training for module in stage.modules()]

    def _check_versions(self, stage: PipeStage, cell: _PipeCell, what: str) -> None:
        """Raise UnfitError where what a cell depends on is not what it was."""
        if cell.versions and cell.versions != self._versions(stage, cell.inputs):
            raise UnfitError(
                f"Pipe: what a stage takes, a parameter or eval() {what}, and the stage is computed again. "
                'Write inplace=False, x = x + y in place of x += y, or checkpoint="never"'
            )

    def _check_output(self, stage: PipeStage, inputs: Any, output: Any) -> None:
        """Raise UnfitError where a gradient would be lost."""
        if (strange := next(strange_in(output), None)) is not None:
            raise UnfitError(f"Pipe: a stage gives a {type(strange).__name__}: no gradient comes through it")
        known = {id(tensor) for tensor in (*tensors_in(inputs), *self._trained[stage.number])}
        for function in (one for tensor in tensors_in(output) for one in functions_behind(tensor.grad_fn)):
            leaf = getattr(function, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise UnfitError(
                    f"Pipe: a stage uses a tensor of shape {[*leaf.shape]} that requires a gradient and is "
                    "no parameter of its children. Its gradient would be lost: make it one, or an input"
                )

    @contextlib.contextmanager
    def _on(self, stage: PipeStage) -> Iterator[None]:
        """The caller's streams, as this thread may have others: a copy runs on the one of its source."""
        with contextlib.ExitStack() as stack:
            for device in sorted(self._streams, key=lambda device: device == stage.device):  # its own last
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


def _buffers(stage: PipeStage) -> list[tuple[int, int]]:
    """Its buffers as they are, but for those of BatchNorm, whose training does not read them."""
    modules = (module for module in stage.modules() if not isinstance(module, BATCH_NORMS))
    return [(id(one), one._version) for module in modules for one in module.buffers(recurse=False)]


@functools.cache
def _gpus_are_real() -> bool:
    return not env.read().virtual_gpus


@contextlib.contextmanager
def _hooks_off(stages: list[PipeStage]) -> Iterator[None]:
    """Within it the hooks of parameters are not called: they get the gradient of the whole batch later."""
    hooked = {p: hooks for stage in stages for p in stage.trained() if (hooks := hooks_of(p, OF_GRADIENTS))}
    for parameter in hooked:
        set_hooks(parameter, OF_GRADIENTS, None)
    try:
        yield
    finally:
        for parameter, hooks in hooked.items():
            set_hooks(parameter, OF_GRADIENTS, hooks)


class Walk:
    """Runs the actions of a schedule once.

    Args:
        prepare: what an action may do before its message is there.
        act: (action, message) -> what it gives to another stage.
        where: the text that an error in an action gets as a note.
    """

    def __init__(
        self,
        schedule: Schedule,
        prepare: Callable[[Action], None],
        act: Callable[[Action, Any], Any],
        where: Callable[[Action], str],
    ) -> None:
        self._schedule, self._prepare, self._act, self._where = schedule, prepare, act, where
        self._changed = threading.Condition()
        self._messages: dict[StageMessage, Any] = {}
        self._error: BaseException | None = None
        self._stopped = False

    def run(self, *, threads: bool) -> None:
        """Run each stage's actions in a thread of its own, or all in this one.

        Raises:
            what an action raised first. The other threads end after the action in which they are.
        """
        if threads:
            workers = [
                threading.Thread(target=self._work, args=(order,), name=f"up.Pipe stage {stage}", daemon=True)
                for stage, order in enumerate(self._schedule.orders)
            ]
            try:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            finally:  # also after an interrupt
                self._stop(None)
                for worker in workers:
                    if worker.ident is not None:
                        worker.join()
        else:
            spans = predict(self._schedule, {"F": 1.0, "B": 1.0}).spans
            self._work(tuple(span.action for span in sorted(spans, key=lambda span: span.start_s)))
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None

    def _work(self, order: tuple[Action, ...]) -> None:
        for action in order:
            try:
                self._prepare(action)
                came = self._came(self._schedule.needs(action))
                if self._stopped:
                    return
                given = self._act(action, came)
            except BaseException as error:  # noqa: BLE001  (`run` raises it)
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in {self._where(action)}")
                self._stop(error)
                return
            if (handed := self._schedule.gives(action)) is not None:
                with self._changed:
                    self._messages[handed[0]] = given
                    self._changed.notify_all()

    def _came(self, message: StageMessage | None) -> Any:
        """Wait for a message, or for an error of another stage."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or message is None or message in self._messages)
            return None if message is None else self._messages.pop(message, None)

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            self._error, self._stopped = self._error or error, True
            self._changed.notify_all()
