"""One call of a pipeline in one process: its cells, forward and backward, in threads or in this one.

A cell is a micro-batch on a stage. It has a graph of its own, whose leaves are its inputs and the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.generators import default_generators, drawing, drawn_seed, generators_kept, seed_of
from unisono.parallel.graph.containers import mapped, strange_in, tensors_in
from unisono.parallel.model_buffers import buffers_kept
from unisono.parallel.parameter_hooks import OF_GRADIENTS
from unisono.torch_internals.fake import OperatorMode, arguments_of
from unisono.torch_internals.training import functions_behind, hooks_of, set_hooks

from .schedule import Action, Schedule, Span, StageMessage, predict

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


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


class PipeRun:
    """One call of a Pipe.

    Args:
        schedule: the actions of each stage, forward and backward.
        micros: the inputs of each micro-batch.
        losses: of (output, device) of each micro-batch; []: outputs are what the run returns.
        again: of (what would require gradients) how many micro-batches are computed again in backward.
    Attributes:
        inputs: the tensors that may get gradients: those in the micro-batches, then the parameters.
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
        self.inputs = [*tensors_in(micros), *dict.fromkeys(itertools.chain(*self._trained))]
        self.grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)
        self._again, self._seed = again if self.grad else 0, drawn_seed()
        self.spans: list[Span] = []
        self._outputs: dict[int, Any] = {}
        self._came_back: list[list[Tensor | None]] = []
        self._cells: dict[tuple[int, int], _PipeCell] = {}
        self._sums: list[dict[Tensor, Tensor]] = [{} for _ in stages]
        self._of_rows: dict[int, list[Tensor | None]] = {}
        self._messages: dict[StageMessage, Future[Any]] = {}
        self._errors: list[BaseException] = []
        devices = [stage.device for stage in stages if stage.device is not None]
        gpus = [device for device in devices if device.type == "cuda"]
        self._threads = len(stages) > 1 and not (gpus and _gpus_are_real())
        self._streams = {device: torch.cuda.current_stream(device) for device in gpus}
        self._default, self._inference = torch.get_default_device(), torch.is_inference_mode_enabled()
        self._autocasts = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)}
            if torch.amp.is_autocast_available(kind)
        }

    def forward(self, *, backward: bool) -> list[Any]:
        """Run all cells, also backward; return the outputs of the micro-batches, or their losses.

        They are not kept here: they lead to this run, which would never be freed.
        """
        self._take("FB" if backward else "F")
        outputs, self._outputs = self._outputs, {}
        return [outputs[micro] for micro in range(len(self._micros))]

    def keep(self, counts: list[int], grads: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Keep those of the outputs, of which micro-batches have so many; return that of the token."""
        own = iter(grads)
        self._came_back = [[*itertools.islice(own, count)] for count in counts]
        return [torch.zeros((), device="cpu")]

    def gradients(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Those of `inputs`. grads: of the loss, or of the token.

        Raises:
            RuntimeError: backward ran already. Whatever a stage raises, with a note that names the stage.
        """
        if not self._sums:
            raise RuntimeError("Pipe: backward ran already, and what it needs is freed. Call the Pipe again")
        if not self._losses:
            self._take("B")
        sums, self._sums = self._sums, []
        found = [one for micro in range(len(self._micros)) for one in self._of_rows.pop(micro)]
        for parameter in self.inputs[len(found) :]:
            parts = [own.pop(parameter) for own in sums if parameter in own]
            found.append(functools.reduce(torch.add, parts) if parts else None)
        if not self._losses or (grad := grads[0]) is None:
            return found
        return [None if one is None else one * grad.to(one.device) for one in found]

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
        try:
            for error in self._errors[:1]:
                raise error
        finally:
            self._errors = []
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
            raise _changed("was changed between forward and backward")
        with self._cell(stage, action), buffers_kept(stage.children.modules()):
            cell.outputs = [*tensors_in(self._computed(stage, action.micro, cell.inputs))]

    def _forward(self, stage: PipeStage, micro: int, came: Any) -> Any:
        inputs = mapped(
            came if stage.number else self._micros[micro], lambda one: self._leaf(one, stage.device)
        )
        state = self._state(stage, inputs) if micro < self._again else None
        output = self._computed(stage, micro, inputs)
        if self.grad:
            if micro == 0:
                self._check_output(stage, inputs, output)
            cell = self._cells[stage.number, micro] = _PipeCell(inputs, state)
            if state is None:
                cell.outputs = [*tensors_in(output)]
            elif state != (now := self._state(stage, inputs)):
                raise _written() if state[1] != now[1] else _changed("is changed in place by the stage")
        sent = mapped(output, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        if stage.number + 1 == len(self._stages):
            self._outputs[micro] = sent
        return sent

    def _backward(self, stage: PipeStage, micro: int, came: Any) -> list[Tensor | None]:
        cell = self._cells.pop((stage.number, micro))
        outputs = cell.outputs or []
        if stage.number + 1 == len(self._stages):
            came = [torch.ones_like(one) for one in outputs] if self._losses else self._came_back[micro]
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
        sums = self._sums[stage.number]
        for parameter in trained:
            if (grad := grads.get(parameter)) is not None:
                sums[parameter] = sums[parameter] + grad if parameter in sums else grad
        given = [grads.get(leaf) for leaf in leaves]
        if stage.number == 0:
            rows = tensors_in(self._micros[micro])
            self._of_rows[micro] = [
                None if grad is None else grad.to(tensor.device)
                for grad, tensor in zip(given, rows, strict=True)
            ]
        return given

    def _leaf(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        moved = tensor.detach() if device is None else tensor.detach().to(device, non_blocking=True)
        return moved.requires_grad_(self.grad and tensor.requires_grad)

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
                stack.enter_context(CELL_DRAWS.of(seed, kind) if self._threads else drawing(seed, kind))
            output = stage.run(inputs)
            if self._losses and stage.number + 1 == len(self._stages):
                output = self._losses[micro](output, stage.device)
            return output

    def _state(self, stage: PipeStage, inputs: Any) -> tuple[list[int], list[tuple[int, int]]]:
        """What a cell depends on: versions of its inputs and parameters, modes of its modules; its buffers.

        Those of BatchNorm are left out: its training does not read them.
        """
        modules = [*stage.children.modules()]
        read = [module for module in modules if not isinstance(module, BATCH_NORMS)]
        buffers = [(id(one), one._version) for module in read for one in module.buffers(recurse=False)]
        tensors = [tensor._version for tensor in (*tensors_in(inputs), *self._trained[stage.number])]
        return tensors + [module.training for module in modules], buffers

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


def _changed(what: str) -> UnfitError:
    return UnfitError(
        f"Pipe: what a stage takes, a parameter or eval() {what}, and the stage is computed again. "
        'Write inplace=False, x = x + y in place of x += y, or checkpoint="never"'
    )


def _written() -> UnfitError:
    return UnfitError(
        "Pipe: a stage writes a buffer in forward, and would find it changed when it is computed again. "
        'Write checkpoint="never"'
    )


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


# ---- random numbers of stages in threads ----


class _CellDraws(OperatorMode):
    """Within `of` each operator of this thread that draws finds PyTorch's default generators as this cell has
    left them. Threads share them: who draws first would depend on timing, and so would a second computation.

    PyTorch notes in variables of the process that some thread is within a mode, and each mode notes how to
    restore them. So all threads share one mode, and enter and leave it one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock, self._here = threading.Lock(), threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler

    def __enter__(self) -> _CellDraws:
        with self._lock:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            super().__exit__(*error)

    @contextlib.contextmanager
    def of(self, seed: int, device_type: str) -> Iterator[None]:
        """The draws of one cell.

        Raises:
            RuntimeError: an operator draws within `torch.utils.checkpoint`, whose second run would find the
                default generators in another state.
        """
        self._here.generators = default_generators(device_type)
        self._here.states = [
            torch.Generator(one.device).manual_seed(seed).get_state() for one in self._here.generators
        ]
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, named):
            return func(*args, **named)
        if _in_checkpoint():
            raise RuntimeError(
                f"{func.overloadpacket.__name__} runs within torch.utils.checkpoint, in a stage of a Pipe "
                "that runs in a thread: its second run would draw other numbers. Leave that out, and write "
                "Pipe(..., checkpoint=...)"
            )
        here = self._here
        with self._lock, generators_kept(here.generators):
            for generator, state in zip(here.generators, here.states, strict=True):
                generator.set_state(state)
            made = func(*args, **named)
            here.states = [generator.get_state() for generator in here.generators]
        return made


CELL_DRAWS = _CellDraws()


def _draws(func: Any, args: Any, named: Any) -> bool:
    """Whether a call of an operator that may draw from a default generator does it."""
    given = dict(zip((argument.name for argument in arguments_of(func)), args, strict=False)) | named
    shares = [given[name] for name in ("dropout_p", "dropout") if name in given]
    own = given.get("generator") is not None
    return given.get("train") is not False and not own and (not shares or any(shares))


def _in_checkpoint() -> bool:
    """Whether a checkpoint of the caller's is between an operator and its cell."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != __name__:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
