"""One call of a pipeline in one process: its cells, forward and backward, in threads or in this one.

A cell is a micro-batch on a stage. It has a graph of its own, whose leaves are its inputs and the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function

from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.generators import drawing, drawing_in_thread, drawn_seed, seed_of
from unisono.parallel.graph.containers import mapped, strange_in, tensors_in
from unisono.parallel.model_buffers import buffers_kept
from unisono.parallel.parameter_hooks import OF_GRADIENTS
from unisono.torch_internals.fake import within_modes
from unisono.torch_internals.training import functions_behind, hooks_of, set_hooks

from .schedule import Action, Schedule, Span, StageMessage, predict

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
CHANGED = (
    "Pipe: what a stage takes, a buffer, a parameter or eval() {}, and the stage is computed again. Write "
    'inplace=False, x = x + y in place of x += y, or checkpoint="never"'
)
WRITTEN = (
    "Pipe: a stage writes a buffer in forward, and would find it changed when it is computed again. Write "
    'checkpoint="never"'
)


class PipeStage(NamedTuple):
    """Children that run one after the other on one device; None: they have no parameters."""

    number: int
    names: list[str]
    children: nn.ModuleList
    device: torch.device | None

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"stage {self.number} (children {names}; {self.device or 'no parameters'})"

    def run(self, value: Any) -> Any:
        """What the last child returns. The first one of the first stage takes a tuple of arguments."""
        for place, child in enumerate(self.children):
            value = child(*value) if self.number == place == 0 else child(value)
        return value

    def trained(self) -> list[nn.Parameter]:
        """Its parameters that get gradients."""
        return [parameter for parameter in self.children.parameters() if parameter.requires_grad]


@dataclass
class _PipeCell:
    """A micro-batch after its forward through a stage. outputs: None: it is computed again in backward."""

    inputs: Any
    state: Any  # what its outputs depend on
    outputs: list[Tensor] | None = None


class _GraphLink(torch.autograd.Function):
    """Gives tensors to a graph. In backward `run` gets their gradients, and returns those of the inputs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], given: list[Tensor], *_inputs: Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        made = [(tensor.detach(), tensor.requires_grad) for tensor in given]
        ctx.mark_non_differentiable(*(tensor for tensor, needed in made if not needed))
        return tuple(tensor for tensor, _ in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.run(grads)


class PipeRun:
    """One call of a Pipe.

    Args:
        schedule: the actions of each stage, forward and backward.
        micros: the inputs of each micro-batch.
        losses: of (output, device) of each micro-batch; []: outputs are what the run returns.
        again: so many micro-batches are computed again in backward, if there is one.
    Attributes:
        inputs: the tensors that may get gradients: those in the micro-batches, and the parameters.
        grad: cells keep what their backward needs.
    """

    def __init__(
        self,
        stages: list[PipeStage],
        schedule: Schedule,
        micros: list[Any],
        losses: Sequence[Callable[[Any, torch.device | None], Tensor]],
        again: int,
    ) -> None:
        self._stages, self._schedule, self._micros, self._losses = stages, schedule, micros, losses
        self._trained = [stage.trained() for stage in stages]  # as they are now: functional_call changes them
        self.inputs = [*dict.fromkeys(itertools.chain(tensors_in(micros), *self._trained))]
        self.grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)
        self._again, self._seed = again if self.grad else 0, drawn_seed()
        self.spans: list[Span] = []
        self._outputs: dict[int, Any] = {}
        self._grads: dict[int, tuple[Tensor | None, ...]] = {}
        self._cells: dict[tuple[int, int], _PipeCell] = {}
        self._sums: list[dict[Tensor, Tensor]] = [{} for _ in stages]
        self._messages: dict[StageMessage, Future[Any]] = {}
        self._errors: list[BaseException] = []
        devices = [stage.device for stage in stages if stage.device is not None]
        gpus = [device for device in devices if device.type == "cuda"]
        self._threads = len(stages) > 1 and not (gpus and _gpus_are_real()) and not within_modes()
        self._streams = {device: torch.cuda.current_stream(device) for device in gpus}
        self._default, self._inference = torch.get_default_device(), torch.is_inference_mode_enabled()
        self._autocasts = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)}
            if torch.amp.is_autocast_available(kind)
        }

    def forward(self) -> Any:
        """Run the cells; return the outputs of the micro-batches, or their loss.

        They are not kept here: they lead to this run, which would never be freed.
        """
        self._take("FB" if self._losses and self.grad else "F")
        outputs = [self._outputs.pop(micro) for micro in range(len(self._micros))]
        if self._losses:
            value = sum(outputs)
            return _GraphLink.apply(self._gradients, [value], *self.inputs)[0] if self.grad else value
        if not self.grad:
            return outputs
        token = torch.zeros((), device="cpu", requires_grad=True)
        (token,) = _GraphLink.apply(self._gradients, [token], *self.inputs)
        return [self._linked(micro, output, token) for micro, output in enumerate(outputs)]

    def _linked(self, micro: int, output: Any, token: Tensor) -> Any:
        """The output of a micro-batch, in the caller's graph."""

        def keep(grads: tuple[Tensor | None, ...]) -> list[Tensor]:
            self._grads[micro] = grads
            return [torch.zeros((), device="cpu")]

        linked = iter(_GraphLink.apply(keep, [*tensors_in(output)], token))
        return mapped(output, lambda _: next(linked))

    def _gradients(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Those of `inputs`. grads: of the loss, or of the token.

        Raises:
            RuntimeError: backward ran already. Whatever a stage raises, with a note that names the stage.
        """
        if not self._sums:
            raise RuntimeError("Pipe: backward ran already, and what it needs is freed. Call the Pipe again")
        if not self._losses:
            self._take("B")
        sums, self._sums = self._sums, []
        found: list[Tensor | None] = []
        for tensor in self.inputs:
            parts = [own.pop(tensor) for own in sums if tensor in own]
            grad = functools.reduce(torch.add, parts) if parts else None
            scale = grads[0] if self._losses else None
            found.append(grad if grad is None or scale is None else grad * scale.to(grad.device))
        return found

    # ---- actions, in threads or in this one ----

    def _take(self, kinds: str) -> None:
        """Run the actions of these kinds."""
        orders = [tuple(one for one in order if one.kind in kinds) for order in self._schedule.orders]
        handed = [self._schedule.gives(action) for action in itertools.chain(*orders)]
        self._messages = {given[0]: Future() for given in handed if given is not None}
        # autograd's thread of a device runs all: the threads would wait for it
        threads = self._threads and not threading.current_thread().name.startswith("Dummy")
        with _hooks_off(self._trained if "B" in kinds else []):
            if threads:
                self._in_threads(orders)
            else:
                part = Schedule(self._schedule.name, tuple(orders), self._schedule.rank_of, len(self._micros))
                spans = predict(part, {"F": 1.0, "B": 1.0}).spans
                self._work([span.action for span in sorted(spans, key=lambda span: span.start_s)])
        if self._errors:
            try:
                raise self._errors[0]
            finally:
                self._errors.clear()  # they lead to this run, which would only be freed by the collector
        for device, stream in self._streams.items():
            if "B" in kinds and stream != (first := torch.cuda.default_stream(device)):
                first.wait_stream(stream)  # which autograd waits for

    def _in_threads(self, orders: list[tuple[Action, ...]]) -> None:
        with ThreadPoolExecutor(len(orders), "up.Pipe stage") as pool:
            try:
                wait([pool.submit(copy_context().run, self._work, order) for order in orders])
            except BaseException as error:  # an interrupt; the pool waits for the actions in which stages are
                self._stop(error)
                raise

    def _work(self, order: Iterable[Action]) -> None:
        """Run actions one after the other, until one raises here or in another stage."""
        for action in order:
            stage = self._stages[action.stage]
            try:
                self._prepare(stage, action)
                came = None
                if (message := self._schedule.needs(action)) is not None:
                    came = self._messages[message].result()
                    del self._messages[message]
                if self._errors:
                    return
                with self._cell(stage, action):
                    run = self._forward if action.kind == "F" else self._backward
                    given = run(stage, action.micro, came)
                if (handed := self._schedule.gives(action)) is not None:
                    self._messages[handed[0]].set_result(given)
            except BaseException as error:  # noqa: BLE001  (`_take` raises the first)
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in {action.kind}{action.micro} of {stage}")
                self._stop(error)
                return

    def _stop(self, error: BaseException) -> None:
        """Let all stages end. A message that is cancelled raises where a stage waits for it or gives it."""
        self._errors.append(error)
        for message in [*self._messages.values()]:
            message.cancel()

    @contextlib.contextmanager
    def _cell(self, stage: PipeStage, action: Action) -> Iterator[None]:
        """The caller's streams, as this thread may have others: a copy runs on the one of its source."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            for device in sorted(self._streams, key=lambda device: device == stage.device):  # its own last
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            stack.enter_context(record_function(f"up::pipe|{action}"))
            yield
        self.spans.append(Span(action.stage, action, start, time.perf_counter()))

    def _prepare(self, stage: PipeStage, action: Action) -> None:
        """Compute a cell again, while the gradients of its outputs are still on their way."""
        if action.kind == "F" or (cell := self._cells[action.stage, action.micro]).outputs is not None:
            return
        if cell.state != self._state(stage, cell.inputs):
            raise UnfitError(CHANGED.format("was changed between forward and backward"))
        with self._cell(stage, action), buffers_kept(stage.children.modules()):
            cell.outputs = [*tensors_in(self._computed(stage, action.micro, cell.inputs))]

    def _forward(self, stage: PipeStage, micro: int, came: Any) -> Any:
        def leaf(tensor: Tensor) -> Tensor:
            moved = tensor.detach()
            moved = moved if stage.device is None else moved.to(stage.device, non_blocking=True)
            return moved.requires_grad_(self.grad and tensor.requires_grad)

        inputs = mapped(came if stage.number else self._micros[micro], leaf)
        state = self._state(stage, inputs) if micro < self._again else None
        output = self._computed(stage, micro, inputs)
        if self.grad:
            if micro == 0:
                self._check_output(stage, inputs, output)
            cell = self._cells[stage.number, micro] = _PipeCell(inputs, state)
            if state is None:
                cell.outputs = [*tensors_in(output)]
            elif state != (now := self._state(stage, inputs)):
                text = WRITTEN if state[0] == now[0] else CHANGED.format("is changed in place by the stage")
                raise UnfitError(text)
        sent = mapped(output, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        if stage.number + 1 == len(self._stages):
            self._outputs[micro] = sent
        return sent

    def _backward(self, stage: PipeStage, micro: int, came: Any) -> list[Tensor | None]:
        cell = self._cells.pop((stage.number, micro))
        outputs = cell.outputs or []
        if stage.number + 1 == len(self._stages):
            ones, none = [torch.ones_like(one) for one in outputs], [None] * len(outputs)
            came = ones if self._losses else self._grads.pop(micro, none)
        pairs = [
            (output, grad.to(output.device))
            for output, grad in zip(outputs, came, strict=True)
            if grad is not None and output.requires_grad
        ]
        leaves, trained = [*tensors_in(cell.inputs)], self._trained[stage.number]
        wanted = [leaf for leaf in (*leaves, *trained) if leaf.requires_grad]
        grads: dict[Tensor, Tensor | None] = {}
        if pairs and wanted:
            ends, own = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, wanted, own, allow_unused=True)
            grads = dict(zip(wanted, found, strict=True))
        given, sums = [grads.get(leaf) for leaf in leaves], self._sums[stage.number]
        rows = () if stage.number else zip(tensors_in(self._micros[micro]), given, strict=True)
        for tensor, grad in (*rows, *((parameter, grads.get(parameter)) for parameter in trained)):
            if grad is not None:
                grad = grad.to(tensor.device)
                sums[tensor] = sums[tensor] + grad if tensor in sums else grad
        return given

    def _computed(self, stage: PipeStage, micro: int, inputs: Any) -> Any:
        """What the stage returns, or the loss of it, as in the caller's thread."""
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._default:
                stack.enter_context(self._default)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, (dtype, enabled) in self._autocasts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self._seed is not None:
                seed = seed_of(self._seed, stage.number, micro)
                kind = "cpu" if stage.device is None else stage.device.type
                draws = drawing_in_thread if self._threads else drawing
                stack.enter_context(draws(seed, kind))
            if stage.number:  # a stage may write what it takes; autograd refuses that of a leaf
                inputs = mapped(inputs, _written_by_stage)
            output = stage.run(inputs)
            if self._losses and stage.number + 1 == len(self._stages):
                output = self._losses[micro](output, stage.device)
            return output

    def _state(self, stage: PipeStage, inputs: Any) -> tuple[dict[Any, Any], dict[Tensor, Any]]:
        """What a cell depends on: values of inputs and parameters, modes of modules; values of buffers.

        Those of BatchNorm are left out while it trains: it does not read them.
        """
        modules = [*stage.children.modules()]
        read = [module for module in modules if not (isinstance(module, BATCH_NORMS) and module.training)]
        tensors = {one: _value_of(one) for one in (*tensors_in(inputs), *stage.children.parameters())}
        buffers = {one: _value_of(one) for module in read for one in module.buffers(recurse=False)}
        return {**tensors, **{module: module.training for module in modules}}, buffers

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


def _value_of(tensor: Tensor) -> tuple[Any, ...]:
    """Differs once the tensor is written, or `tensor.data` assigned, which leaves its version as it is.

    The storage is kept: no other one gets its address.
    """
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return tensor._version, tensor.untyped_storage(), *place


def _written_by_stage(leaf: Tensor) -> Tensor:
    made: Tensor = _GraphLink.apply(list, [leaf], leaf)[0] if leaf.requires_grad else leaf
    return made


@functools.cache
def _gpus_are_real() -> bool:
    return not env.read().virtual_gpus


@contextlib.contextmanager
def _hooks_off(trained: Iterable[list[nn.Parameter]]) -> Iterator[None]:
    """Within it the hooks of parameters are not called: they get the gradient of the whole batch later."""
    hooked = {p: hooks for p in itertools.chain(*trained) if (hooks := hooks_of(p, OF_GRADIENTS))}
    for parameter in hooked:
        set_hooks(parameter, OF_GRADIENTS, None)
    try:
        yield
    finally:
        for parameter, hooks in hooked.items():
            set_hooks(parameter, OF_GRADIENTS, hooks)
