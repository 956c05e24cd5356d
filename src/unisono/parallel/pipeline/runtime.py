"""Runs the actions of one rank: forward, backward, and the messages between stages.

Shapes of a message are sent before the first one of a kind; then they are known. A sender does not wait. A
message is a tuple of tensors; tag 2 * stage is activations, tag 2 * stage + 1 gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import tensors_in
from unisono.parallel.graph.stage_program import StageProgram
from unisono.parallel.loss_check import LossParameters, end_of_graph
from unisono.parallel.loss_weights import mean, pair
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.programs import ModelPrograms
from unisono.parallel.sharded_parameters import DataAxis, reshard
from unisono.torch_internals import training
from unisono.torch_internals.group_use import within

from .schedule import Action, Schedule, Span, StageMessage


@dataclass
class StepInput:
    """The input of one step.

    Args:
        micros: (inputs, targets) of each micro-batch.
        weights: the share of each micro-batch's loss in the step's.
        factor: losses are multiplied by it before backward.
        counts: the loss returns (sum, count).
        update: the gradients are reduced at the end; else they stay, and the next step adds to them.
        recorded: under a context axis the loss belongs to the program; else it gets whole outputs.
        guard: within it the loss is called.
    """

    micros: Sequence[tuple[Any, Any]]
    weights: Sequence[float]
    loss: Callable[[Any, Any], Tensor]
    factor: float = 1.0
    train: bool = True
    counts: bool = False
    update: bool = True
    recorded: bool = True
    guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def counted(self, output: Any, targets: Any) -> tuple[Tensor, float]:
        """The loss of a micro-batch, and its count."""
        with self.guard():
            return self.checked(self.loss(output, targets))

    def checked(self, value: Any) -> tuple[Tensor, float]:
        """Likewise, of what the loss returned."""
        return pair(value) if self.counts else (mean(value), 0.0)

    def mean(self, output: Any, targets: Any) -> Tensor:
        """The mean loss of a micro-batch."""
        total, count = self.counted(output, targets)
        return total / count if self.counts else total


@dataclass
class _ForwardRecord:
    """One micro-batch after its forward through one stage."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # on the last stage: the loss
    grads: list[Tensor] | None = None
    groups: Any = None
    shape: Hashable = None


@dataclass
class _StepState:
    schedule: Schedule
    step_input: StepInput
    forward_records: dict[tuple[int, int], _ForwardRecord] = field(default_factory=dict)
    received: dict[StageMessage, tuple[Tensor, ...]] = field(default_factory=dict)
    loss: Tensor | float = 0.0
    count: float = 0.0
    spans: list[Span] = field(default_factory=list)


class PipelineRuntime:
    """The stages of one rank.

    Args:
        units: their parameters; its `root` is called as `root(stage, activations, inputs)`.
        single: the plan has one stage, and the root is the user's model: called as `root(*inputs)`.
    Attributes:
        interrupted: the last run ended with an error.
        loss_parameters: what a loss may not take; None: that was checked.
        programs: what runs in place of the model's forward, or of its stages; None: they run themselves.
        runs_twice: a module runs its program twice, so that parameters are used more than once.
    """

    def __init__(
        self, units: DataAxis, mesh: PlanMesh, output: Callable[[Any], Any], *, single: bool
    ) -> None:
        self._units, self._root = units, units.root
        self._mesh, self._output, self._single = mesh, output, single
        self._device = torch.device(mesh.axes.device_type)
        self.interrupted = self._stale = self.runs_twice = False
        self.loss_parameters: LossParameters | None = None
        self.programs: ModelPrograms | None = None
        self._join_once: dict[Hashable, bool] = {}  # whether the weights of a stage do, by what it runs
        self._messages = PipelineCommunicator(mesh.group("pipeline"), self._device)

    def run(self, schedule: Schedule, step_input: StepInput) -> tuple[Tensor | float, float, list[Span]]:
        """Run this rank's actions; return its part of the loss, its count, and the times of each action."""
        with self._completing():
            return self._run(schedule, step_input)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within the block comes a backward of the caller's; after it all ranks have its gradients."""
        with self._completing():
            self._units.before_backward(last=True)
            yield
            self._units.finish()

    @contextlib.contextmanager
    def _completing(self) -> Iterator[None]:
        """Drop what an earlier run has left, and note whether this one comes to its end."""
        if self.interrupted or self._stale:
            self._units.reset()
        self.interrupted, self._stale = True, False
        yield
        self.interrupted = False

    def _run(self, schedule: Schedule, step_input: StepInput) -> tuple[Tensor | float, float, list[Span]]:
        step = _StepState(schedule, step_input)
        if not self._single:
            step_input.guard = _guard_of_loss(self._mesh.ranks_of(schedule.rank_of[-1]))
        order = [a for a in schedule.orders[self._mesh.stage] if step_input.train or a.kind == "F"]
        split, reduces = any(action.kind == "W" for action in order), step_input.train and step_input.update
        final = next((action for action in reversed(order) if reduces and action.kind != "F"), None)
        with torch.set_grad_enabled(step_input.train):
            for action in order:
                self._take(step, action)
                start = time.perf_counter()
                if action.kind in "BI":
                    self._units.before_backward(last=action is final and not split)
                with record_function(f"up::pipeline|{action}"), self._types(action):
                    {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}[
                        action.kind
                    ](step, action)
                step.spans.append(Span(self._mesh.stage, action, start, time.perf_counter()))
                self._give(step, action)
        if split and reduces:
            self._units.reduce_now()
        if reduces:
            self._units.finish()
        plan = self._mesh.plan
        if not step_input.train and (plan.zero > 0 or plan.low or plan.swap is not None):
            reshard(self._root)  # no backward frees what the last forward has gathered
        self._messages.finish()
        return step.loss, step.count, step.spans

    def _types(self, action: Action) -> contextlib.AbstractContextManager[object]:
        """What chooses the types of the operators of an action."""
        if action.kind != "F" or self._mesh.plan.precision != "autocast":
            return contextlib.nullcontext()  # within the caller's, if there is one
        # no casts are kept: fully_shard frees the parameters of which they are
        return torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False)

    def follow_frozen(self) -> None:
        """Other activations than before may require gradients. All ranks of a pipeline call this."""
        self._messages.forget()

    def forget(self) -> None:
        """Drop what earlier runs have left, when the next one begins: gradients, collectives in flight."""
        self._stale = True

    # ---- between stages ----

    def _take(self, step: _StepState, action: Action) -> None:
        """Receive the input of `action`."""
        message = step.schedule.needs(action)
        if message is None or message in step.received:
            return
        source = self._mesh.peer(step.schedule.rank_of[message.stage])
        if message.kind == "F":
            shape = self._key(step.step_input, action.micro)
            step.received[message] = self._messages.recv(message, source, shape)
        else:
            outputs = [t for t in step.forward_records[action.stage, action.micro].outputs if t.requires_grad]
            specs = [TensorSpec(tuple(t.shape), t.dtype, False) for t in outputs]
            if outputs and self._sends_unused(step, action.stage, action.micro):
                specs.append(TensorSpec((len(outputs),), torch.float32, False))
            step.received[message] = self._messages.recv_known(message, specs, source)

    def _give(self, step: _StepState, action: Action) -> None:
        """Send the output of `action`."""
        given = step.schedule.gives(action)
        if given is None:
            return
        message, stage = given
        rank, record = step.schedule.rank_of[stage], step.forward_records[action.stage, action.micro]
        if action.kind == "F":
            if rank == self._mesh.stage:
                step.received[message] = tuple(
                    t.detach().requires_grad_(t.requires_grad) for t in record.outputs
                )
            else:
                shape = self._key(step.step_input, action.micro)
                self._messages.send(message, record.outputs, self._mesh.peer(rank), shape)
            return
        wanted = [t for t in record.inputs if t.requires_grad]
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]
        if wanted and self._sends_unused(step, stage, action.micro):
            flags = [t.grad is not None for t in wanted]
            grads.append(torch.tensor(flags, dtype=torch.float32, device=self._device))
        if rank == self._mesh.stage:
            step.received[message] = tuple(grads)
        else:
            self._messages.send_known(message, grads, self._mesh.peer(rank))
        if action.kind == "B":
            del step.forward_records[action.stage, action.micro]

    # ---- actions ----

    def _forward(self, step: _StepState, action: Action) -> None:
        _, stage, micro = action
        given, program = step.step_input, self._program(step.step_input, micro)
        inputs, targets = given.micros[micro]
        activations = () if stage == 0 else step.received.pop(StageMessage("F", stage - 1, micro))
        recorded = program is not None and program.ends_with_loss
        if program is not None:
            output = program.forward(self._root, stage, activations, inputs, targets)
        else:
            output = call(self._root, inputs) if self._single else self._root(stage, activations, inputs)  # type: ignore[operator]
        if stage + 1 < step.schedule.stages:
            outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        else:
            weight = given.weights[micro]
            output = output if recorded else self._output(output)
            parameters = self.loss_parameters if torch.is_grad_enabled() else None
            begun = 0 if parameters is None else end_of_graph()
            if recorded:
                loss, count = given.checked(output)
            else:
                loss, count = given.counted(output, targets) if weight else (_nothing(output), 0.0)
            step.count += count
            if parameters is not None and loss.requires_grad:
                parameters.check(loss, begun, activations)
                if parameters.may_end(given.loss):
                    self.loss_parameters = None
            step.loss = step.loss + loss.detach().double() * weight
            outputs = (loss * (weight * given.factor),)
        step.forward_records[stage, micro] = _ForwardRecord(activations, outputs)

    def _arrived(
        self, step: _StepState, action: Action
    ) -> tuple[_ForwardRecord, list[Tensor], list[Tensor] | None]:
        """The micro-batch, its outputs that require gradients, and those gradients."""
        record = step.forward_records[action.stage, action.micro]
        outputs = [t for t in record.outputs if t.requires_grad]
        if action.stage + 1 == step.schedule.stages:
            return record, outputs, None
        grads = list(step.received.pop(StageMessage("B", action.stage + 1, action.micro)))
        if outputs and self._sends_unused(step, action.stage, action.micro):
            used = [flag > 0 for flag in grads.pop().tolist()]
            outputs = [t for t, flag in zip(outputs, used, strict=True) if flag]
            grads = [t for t, flag in zip(grads, used, strict=True) if flag]
            record.outputs = tuple(outputs)
        return record, outputs, grads

    def _sends_unused(self, step: _StepState, stage: int, micro: int) -> bool:
        """Whether gradients of what a stage sends come with flags: zeros stand for those that are None."""
        program = self._program(step.step_input, micro)
        return program is not None and program.sends_unused(stage)

    def _backward(self, step: _StepState, action: Action) -> None:
        record, outputs, grads = self._arrived(step, action)
        if outputs:
            torch.autograd.backward(outputs, grads)
        record.outputs = ()
        if action.stage == 0:
            del step.forward_records[action.stage, action.micro]

    def _inputs(self, step: _StepState, action: Action) -> None:
        record, outputs, grads = self._arrived(step, action)
        record.grads = grads
        if not any(t.requires_grad for t in record.inputs) or not outputs:
            return  # no gradients of inputs are needed; _weights does all of backward
        wanted = [t for t in record.inputs if t.requires_grad]
        unused = self._sends_unused(step, action.stage - 1, action.micro)  # PyTorch 2.12 wants all to be used
        if self.runs_twice or unused or not self._in_two_passes(step, action, outputs, wanted):
            found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
            for tensor, grad in zip(wanted, found, strict=True):
                tensor.grad = grad
            return
        if len(outputs) > 1 or training.is_view(outputs[0]):  # it detaches them in place, and
            outputs = [t.clone() for t in outputs]  # an operator may have saved what goes beside another
        found, record.groups = training.backward_of_inputs(
            outputs, grads, wanted, self._parameters(action.stage)
        )
        for tensor, grad in zip(wanted, found, strict=True):
            tensor.grad = grad
        record.outputs = ()

    def _in_two_passes(
        self, step: _StepState, action: Action, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> bool:
        key = action.stage, self._key(step.step_input, action.micro), len(outputs), len(inputs)
        if key not in self._join_once:
            self._join_once[key] = _weights_join_once(outputs, inputs)
        return self._join_once[key]

    def _weights(self, step: _StepState, action: Action) -> None:
        record = step.forward_records.pop((action.stage, action.micro))
        outputs = [t for t in record.outputs if t.requires_grad]
        if record.groups is not None:
            training.backward_of_weights(self._parameters(action.stage), record.groups)
        elif outputs:
            trained = [p for p in self._parameters(action.stage) if p.requires_grad]
            torch.autograd.backward(outputs, record.grads, inputs=trained or None)
        self._units.after_weights()

    def _key(self, given: StepInput, micro: int) -> Hashable:
        """What determines the shapes of all messages."""
        program = self._program(given, micro)
        if program is not None:
            return program.digest
        return tuple((tuple(t.shape), t.dtype) for t in tensors_in(given.micros[micro][0]))

    def _program(self, given: StepInput, micro: int) -> StageProgram | None:
        """What runs; None: the model, or its pieces."""
        if self.programs is None:
            return None
        loss = given.loss if given.recorded and given.weights[micro] else None
        return self.programs.of(*given.micros[micro], loss)

    def _parameters(self, stage: int) -> Iterator[nn.Parameter]:
        root: Any = self._root
        found: Iterator[nn.Parameter] = root.stages[str(stage)].parameters()
        return found


def _nothing(output: Any) -> Tensor:
    """A loss of 0 with gradients of 0: no label of these rows counts, and a mean over none is NaN."""
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in tensors_in(output)]
    # a model that computes its own loss has this NaN among its outputs, and NaN * 0 is NaN
    zeros = ((t * 0.0).nan_to_num().sum() for t in reals if t.is_floating_point())
    total: Tensor = sum(zeros)  # type: ignore[assignment]
    return total


def _guard_of_loss(ranks: Sequence[int]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Within it collectives with ranks that do not have the last stage raise: those do not run the loss."""
    last = frozenset(ranks)

    def refuse(name: str, who: str) -> None:
        raise ValueError(
            f"the loss calls {name} with {who}, and not all of them come: under pipeline= the ranks of the "
            f"last stage alone compute the loss, {sorted(last)}. Call it outside of the step, or with those "
            "ranks only (use data= and zero= for a loss over all ranks)"
        )

    return lambda: within(last, refuse)


# ---- two passes of backward ----


def _weights_join_once(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether a stage's gradients of weights can be computed after those of its inputs, weight by weight.

    PyTorch's two passes of backward stop at the nodes where a weight joins what the inputs reach:

        input -- mul ------ add -- output          each weight joins at one node: two passes
                   |         |
               weight   other weight

    A part of the graph that has weights only has to join at one node. Where it joins at several, the second
    pass would go through it several times; where it is an output by itself, never.
    Cost: one visit of each node of the graph.

    Args:
        outputs: that require gradients.
        inputs: leaves that do.
    """
    leaves = {_node(tensor) for tensor in inputs}
    roots = [_node(tensor) for tensor in outputs]
    reaches: dict[Any, bool] = {}  # the inputs
    for node in _children_first(roots):
        reaches[node] = node in leaves or any(reaches[child] for child in _children(node))
    if not all(reaches[root] for root in roots):
        return False
    joins = [child for node in reaches for child in {*_children(node)} if not reaches[child]]
    return len(joins) == len(set(joins))


def _node(tensor: Tensor) -> Any:
    """Of a tensor in the graph: of a leaf, what adds up its gradient."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    view: Any = tensor.view_as(tensor)
    return view.grad_fn.next_functions[0][0]


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Sequence[Any]) -> list[Any]:
    """Every node once, after those that it leads to."""
    found: dict[Any, None] = {}
    waiting = [(root, False) for root in roots]
    while waiting:
        node, left = waiting.pop()
        if left:
            found[node] = None
        elif node not in found:
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node) if child not in found]
    return list(found)


# ---- messages ----


TYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
TENSORS, DIMS = 64, 8  # the most that a header can hold


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class PipelineCommunicator:
    """The messages of one rank with the other ranks of its pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._known: dict[Hashable, tuple[TensorSpec, ...]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: StageMessage, tensors: Sequence[Tensor], to: int, shape: Hashable) -> None:
        """Send activations. `shape`: the key of their shapes, equal at both ends.

        Raises:
            ValueError: equal inputs gave other shapes than before, or a message has too many tensors.
        """
        specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        key = _kind(message, shape)
        if key not in self._known:
            self._known[key] = specs
            self._post(_header(specs, self._device), to, message)
        elif self._known[key] != specs:
            raise ValueError(
                f"stage {message.stage} returned {specs} where it returned {self._known[key]} for inputs "
                "of the same shapes; a stage's shapes must follow from those of its inputs"
            )
        self.send_known(message, tensors, to)

    def recv(self, message: StageMessage, source: int, shape: Hashable) -> tuple[Tensor, ...]:
        """Receive activations; those that gradients go back to require them."""
        key = _kind(message, shape)
        if key not in self._known:
            header = torch.empty(1 + TENSORS * (3 + DIMS), dtype=torch.int64, device=self._device)
            dist.recv(header, source, group=self._group, tag=_tag(message))
            self._known[key] = _read(header)
        specs = self._known[key]
        tensors = self.recv_known(message, specs, source)
        return tuple(t.requires_grad_(spec.requires_grad) for t, spec in zip(tensors, specs, strict=True))

    def send_known(self, message: StageMessage, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors whose shapes the receiver knows."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        for tensor in tensors:
            self._post(_real(tensor.detach().resolve_conj().contiguous()), to, message)

    def recv_known(
        self, message: StageMessage, specs: Sequence[TensorSpec], source: int
    ) -> tuple[Tensor, ...]:
        """Receive tensors of known shapes."""
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs)
        for tensor in tensors:
            dist.recv(_real(tensor), source, group=self._group, tag=_tag(message))
        return tensors

    def expect(self, message: StageMessage, shape: Hashable, specs: tuple[TensorSpec, ...]) -> None:
        """Know the shapes of activations, which are not sent then."""
        self._known[_kind(message, shape)] = specs

    def forget(self) -> None:
        """Tell shapes anew. Both ends call this between two steps."""
        self._known.clear()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _post(self, tensor: Tensor, to: int, message: StageMessage) -> None:
        work = dist.isend(tensor, to, group=self._group, tag=_tag(message))
        assert work is not None
        self._sent.append((work, tensor))


def _kind(message: StageMessage, shape: Hashable) -> Hashable:
    """What equal shapes belong to."""
    return message.kind, message.stage, shape, torch.is_grad_enabled()


def _real(tensor: Tensor) -> Tensor:
    """The memory of a complex tensor as real numbers, which every backend sends."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _tag(message: StageMessage) -> int:
    return 2 * message.stage + (message.kind == "B")


def _header(specs: tuple[TensorSpec, ...], device: torch.device) -> Tensor:
    if len(specs) > TENSORS or any(len(spec.shape) > DIMS for spec in specs):
        raise ValueError(
            f"a stage may return up to {TENSORS} tensors of up to {DIMS} dimensions, not {specs}"
        )
    numbers = [len(specs)]
    for spec in specs:
        numbers += [TYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
        numbers += [0] * (DIMS - len(spec.shape))
    numbers += [0] * (1 + TENSORS * (3 + DIMS) - len(numbers))
    return torch.tensor(numbers, device=device)


def _read(header: Tensor) -> tuple[TensorSpec, ...]:
    numbers = [int(number) for number in header.tolist()]
    rows = [numbers[1 + i * (3 + DIMS) : 1 + (i + 1) * (3 + DIMS)] for i in range(numbers[0])]
    return tuple(TensorSpec(tuple(row[3 : 3 + row[2]]), TYPES[row[0]], bool(row[1])) for row in rows)
