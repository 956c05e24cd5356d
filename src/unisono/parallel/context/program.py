"""A recorded program on the ranks of a context group: what is cut, proved operator by operator, and its run.

Every rank gets whole inputs. A value without the sequence, such as a mask or positions, is computed whole on
each rank. The cut begins where a value with the sequence of an input meets a parameter: each rank takes its
positions there. From then on each operator runs on these, as its rule says (rules.py). What has no rule is
refused. The operators that were proved are those that run, so there is no other program to be wrong.

    ids [2, 64] -> embedding: cut, [2, 16, 8] on each of 4 ranks -> ... -> nll_loss: a sum over the ranks
    arange -> embedding: whole, [64, 8] -> added to the former: its 16 positions are taken

Modules whose parameters are gathered, or that are recomputed (units), are called with a ForwardCall in front
of the values that they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.costs.collectives import Link
from unisono.parallel.generators import drawing, drawn_seed, seed_of
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.executor import (
    ForwardCall,
    Insertion,
    RunningModel,
    RunStep,
    Values,
    operator,
    unit,
)
from unisono.parallel.graph.noted_call import EXPERT_LIST
from unisono.parallel.graph.program import HOOKS, Graph, Node, Ref, refs, replayed, writes_of, written_in
from unisono.parallel.graph.rules import DRAWS, NEW, slice_of
from unisono.parallel.graph.stage_program import Stage, StageProgram, StageStart
from unisono.parallel.tensor_moves import TensorAxis

from .call import ContextError, RuleCall, label_of, refusal, warn_of
from .cut_parts import CutParts
from .layout import LayoutError, PositionSpan, SequenceDim, gathered, local_shape, move, take, whole
from .rules import ATTENTION, WholeMemory, on_all, run_rule

STATE = ("parameter", "buffer")
# whose memory may be that of this rank's positions: it draws nothing, and has no strides of all of them
FILLED = {name: at for name, at in NEW.items() if name not in {*DRAWS, "aten.empty_strided"}}


@dataclass
class ProgramStep:
    """One operator.

    Attributes:
        wants: value -> where this operator needs it.
        run: what runs in place of the operator.
        draws: random numbers for a value that all ranks have.
        apart: random numbers that are others on each rank of the tensor axis.
        taken: value -> the number of the part of it that is taken once for all operators.
        parts: (value, the number of its part, where), taken when this operator has made the value.
    """

    node: Node
    wants: dict[int, SequenceDim] = field(default_factory=dict)
    run: Any = None
    draws: bool = False
    apart: bool = False
    taken: dict[int, int] = field(default_factory=dict)
    parts: list[tuple[int, int, SequenceDim]] = field(default_factory=list)

    @property
    def used(self) -> set[int]:
        """The values that it takes."""
        return {self.taken.get(ref.value, ref.value) for ref in refs((self.node.args, self.node.named))} | {
            value for value, _, _ in self.parts
        }

    @property
    def made(self) -> list[int]:
        """The values that are there afterwards."""
        return self.node.made + [part for _, part, _ in self.parts]


class ContextAxis:
    """The context axis of one model; where the plan has one stage, the model that runs, too.

    Args:
        ranks: that share a sequence.
        device: its type.
    Attributes:
        parts: this rank's parts of what the tensor axis cuts; None: the plan has none.
        units: modules (paths) that are called, since they are wrapped. See `follow`.
    """

    def __init__(self, ranks: TensorAxis, device: str) -> None:
        self.ranks, self.device, self.link = ranks, device, Link()
        self.parts: CutParts | None = None
        self.units: frozenset[str] = frozenset()
        self._modules: dict[str, nn.Module] = {}

    def follow(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        """Run `model` by `units` from now on, which are wrapped."""
        self._modules = dict(model.named_modules())
        paths = {module: path for path, module in self._modules.items()}
        called = {module for module in units if module in paths and module is not model}
        self.units = frozenset(paths[module] for module in called)
        for module in (*called, model):
            _run_calls(module)

    def module(self, path: str) -> nn.Module:
        """The module of a path."""
        return self._modules[path]

    def held(self, name: str) -> Any:
        """A parameter or buffer as it is now."""
        path, _, leaf = name.rpartition(".")
        return getattr(self._modules[path], leaf)

    def drawing(self, seed: int | None, *where: int | str) -> AbstractContextManager[None]:
        """Draw from a seed of the ranks' own; None: nothing has values."""
        return nullcontext() if seed is None else drawing(seed_of(seed, *where), self.device)


def _run_calls(module: Any) -> None:
    """Let the forward of a module run what it is given by a program."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], ForwardCall):
            return args[0].run(*args[1:])
        return own(*args, **named)

    module.forward = forward


class ContextProgram(StageProgram):
    """One recorded program, proved for the ranks of a context group.

    Args:
        graph: of inputs whose first tensors are those of the model: `sequences` of them have, if they have
            two dims, the sequence in dim 1.
        model: of the graph, or a copy of it.
        starts: where the stages of a pipeline but the first begin.
        loss: the program ends with that of the model's output.
    Attributes:
        places: where the values that are cut have the sequence.
        notes: what is not cut, though it has the sequence -> why.
    Raises:
        ContextError, StageError: it cannot be cut.
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        starts: Sequence[StageStart],
        sequences: int,
        axis: ContextAxis,
        *,
        loss: bool,
    ) -> None:
        self.graph, self._axis, self._ranks = graph, axis, axis.ranks
        self.written = written_in(graph)
        self._check()
        self.notes: dict[str, str] = {}
        self._filled: dict[int, SequenceDim] = {}  # new memory that gets parts of the sequence
        self._proved = self._prove(sequences)
        if not self.places:
            raise ContextError(
                f"nothing in the program of {graph.model} can be cut along a sequence: no input of two "
                "dimensions, [rows, positions], meets a parameter. Leave out context="
            )
        super().__init__(graph, model, starts, operators=True)
        run = {item.first for stage in self.stages for item in stage.items}
        if self._ranks.place == 0:
            warn_of(graph, [node for node in self._on_all if node.number in run], self._ranks.parts)
        self._parts = [] if starts else self._take_once([self._proved[number] for number in sorted(run)])
        if loss and any(ref.value in self.places for ref in tensors_in(graph.result, Ref)):
            raise ContextError(
                "the loss returns a value for each position; it must return its mean over them, or "
                "(sum, count)"
            )
        self.ends_with_loss = loss

    # ---- proof ----

    def _refuse(self, node: Node, why: str) -> ContextError:
        return refusal(self.graph, node, why, self._ranks.parts)

    def _check(self) -> None:
        """Refuse what a replay of the operators would lose."""
        graph = self.graph
        for number in [*graph.own_backward, *graph.taken_by_functions][:1]:
            node = graph.nodes[max(graph.values[number].node, 0)]
            raise self._refuse(node, "a torch.autograd.Function has a backward that is not recorded")
        for number in sorted(graph.recomputed)[:1]:
            raise self._refuse(
                graph.nodes[number], "torch.utils.checkpoint runs it; write Plan(recompute=True) in its place"
            )
        for number, attribute in graph.kept.items():
            node = graph.nodes[graph.values[number].node]
            raise self._refuse(node, f'the program keeps it in the attribute "{attribute}"')
        if any(call.function in HOOKS for call in graph.calls):
            raise ContextError(
                f"{graph.model} registers a hook on a tensor while it runs, which context="
                f"{self._ranks.parts} would lose: its program runs operator by operator. Leave out context="
            )
        for name, number in graph.rebound.items():
            raise self._refuse(graph.nodes[graph.values[number].node], f'it replaces the buffer "{name}"')
        for node in graph.nodes:
            for ref in refs((node.args, node.named)):
                if graph.values[ref.value].kind == "constant" and graph.constants[ref.value] is None:
                    raise self._refuse(node, "it takes a tensor that was made outside of the program")
            for before, _ in writes_of(node):
                if graph.values[graph.values[before].storage].kind in (*STATE, "constant"):
                    raise self._refuse(node, "it writes into a buffer, or into a tensor that is not its own")

    def _prove(self, sequences: int) -> list[ProgramStep]:
        """Prove all operators; again, where memory turns out to be filled by parts of the sequence."""
        while True:
            self._begin(sequences)
            try:
                return [self._step(node) for node in self.graph.nodes]
            except WholeMemory as found:
                self._filled[found.value] = found.place

    def _begin(self, sequences: int) -> None:
        ranks = self._ranks.parts
        self.places: dict[int, SequenceDim] = {}
        self._on_all: list[Node] = []  # what runs on all positions
        # values that every rank has, and that have an input's sequence
        self._whole: dict[int, SequenceDim] = {}
        inputs = [value for value in self.graph.values if value.kind == "input"][:sequences]
        for value in inputs:
            if len(value.shape) > 1 and value.shape[1] > 1:
                self._whole[value.number] = SequenceDim(
                    1, 1, PositionSpan(value.shape[1], 0, value.shape[1], ranks)
                )
        # values that depend on parameters
        self._trained = {value.number for value in self.graph.values if value.kind == "parameter"}

    def _new_memory(self, value: int, place: SequenceDim) -> int | None:
        """The value that an operator made as new memory, and of which this one is all positions."""
        values = self.graph.values
        while values[value].shape[place.dim] == place.outer * place.span.size and values[value].node >= 0:
            node = self.graph.nodes[values[value].node]
            if node.name in FILLED:
                return None if value in self._filled else value
            along = (slice_of(node)[1] or 0) % len(values[value].shape) if node.name == "aten.slice" else None
            if along == place.dim or (along is None and node.name != "aten.detach"):
                return None
            value = node.args[0].value
        return None

    def _fill(self, node: Node, place: SequenceDim) -> ProgramStep:
        """New memory for this rank's positions."""
        (number,) = node.outputs
        assert number is not None
        self.places[number] = place
        sizes, at = local_shape(self.graph.values[number].shape, place, self._ranks.place), FILLED[node.name]
        op = node.op
        return ProgramStep(node, run=lambda *args, **named: op(*args[:at], sizes, *args[at + 1 :], **named))

    def _step(self, node: Node) -> ProgramStep:
        if node.outputs and node.outputs[0] in self._filled:
            return self._fill(node, self._filled[node.outputs[0]])
        given = {*node.taken}
        cut = {number: self.places[number] for number in given if number in self.places}
        marked = {number: self._whole[number] for number in given if number in self._whole}
        trained = bool(given & self._trained)
        begins = not cut and bool(marked) and trained
        made = node.made
        if not cut and not begins:
            if trained:
                self._trained.update(made)
            if marked:
                self._follow(node, marked)
            draws = node.name == EXPERT_LIST or _draws(node)
            return ProgramStep(node, draws=draws, apart=self._apart(node))
        if begins:
            self._check_length(node, marked)
        whole = not cut
        call = RuleCall(self.graph, node, cut or marked, self._ranks, self._axis.link, self.written, whole)
        found = self._places(call)
        if call.on_all:
            self._on_all.append(node)
        wants = (marked if begins and not call.on_all else {}) | call.wants
        for number, place in zip(node.outputs, found, strict=True):
            if number is not None and place is not None:
                self.places[number] = place
            elif number is not None:
                self._trained.add(number)
        for before, _ in writes_of(node):
            if before in wants:
                raise self._refuse(node, "it writes a part of the sequence into a value that every rank has")
        whole = node.name == EXPERT_LIST  # runs on all positions
        draws = whole or (_draws(node) and not any(number in self.places for number in made))
        return ProgramStep(node, wants, call.run, draws=draws, apart=self._apart(node))

    def _places(self, call: RuleCall) -> list[SequenceDim | None]:
        """Where the outputs have the sequence. What cannot run on a rank's positions runs on all."""
        node = call.node
        try:
            return run_rule(call)
        except WholeMemory as error:
            if (new := self._new_memory(error.value, error.place)) is not None:
                raise WholeMemory(new, error.place) from None
            refused = self._refuse(node, str(error))
        except LayoutError as error:
            refused = self._refuse(node, str(error))
        if call.whole or (node.name.startswith("unisono.") and node.name != ATTENTION):
            raise refused
        call.wants, call.run = {}, None
        try:
            return on_all(call, [None for _ in node.outputs])
        except LayoutError:
            raise refused from None

    def _apart(self, node: Node) -> bool:
        """Whether it draws numbers that are others on each rank of the tensor axis."""
        return _draws(node) and any(first <= node.number < last for first, last in self.graph.apart)

    def _follow(self, node: Node, marked: dict[int, SequenceDim]) -> None:
        """Follow an input's sequence through values that are not cut yet, as far as rules do."""
        call = RuleCall(self.graph, node, marked, self._ranks, self._axis.link, self.written, whole=True)
        try:
            found = run_rule(call)
        except (LayoutError, StopIteration) as error:
            note = f"context: every rank computes all positions of what follows {node.name}, at {node.line}"
            self.notes[note] = str(error)
            return
        for number, place in zip(node.outputs, found, strict=True):
            if number is not None and place is not None:
                self._whole[number] = place

    def _check_length(self, node: Node, marked: dict[int, SequenceDim]) -> None:
        for place in marked.values():
            if place.span.length < 2 * self._ranks.parts:
                raise self._refuse(
                    node,
                    f"its sequence has {place.span.length} positions, and {self._ranks.parts} ranks take "
                    f"{2 * self._ranks.parts} parts",
                )

    # ---- steps ----

    def _take_once(self, steps: Sequence[ProgramStep]) -> list[tuple[int, int, SequenceDim]]:
        """Have a part of a whole value taken where the value is made; return the parts of inputs.

        Memory that is written in place is taken where it is needed, as are parameters.
        """
        parts: dict[tuple[int, SequenceDim], int] = {}
        inputs: list[tuple[int, int, SequenceDim]] = []
        for step in steps:
            for number, place in step.wants.items():
                value = self.graph.values[number]
                late = value.storage in self.written or value.kind not in ("operator", "input")
                if number in self.places or late:
                    continue
                if (number, place) not in parts:
                    part = parts[number, place] = len(self.graph.values) + len(parts)
                    there = inputs if value.kind == "input" else self._proved[value.node].parts
                    there.append((number, part, place))
                step.taken[number] = parts[number, place]
        return inputs

    def _prepared(self, stage: Stage, bounds: Sequence[int]) -> list[RunStep]:
        """The steps of a stage, and of operators that any stage can run."""
        proved = {item.first: self._proved[item.first] for item in stage.items}
        last = {value: number for number in sorted(proved) for value in proved[number].used}
        last |= dict.fromkeys((*stage.goes, *stage.result), len(self.graph.nodes))
        called = {
            frame.number
            for frame in self.graph.frames
            if frame.path in self._axis.units and bounds[0] <= frame.first < frame.last <= bounds[1]
        }
        inputs = [RunStep(functools.partial(self._take, self._parts))] if self._parts else []
        return inputs + self._within(proved, 0, len(self.graph.nodes), called, last)

    def _within(
        self, proved: dict[int, ProgramStep], first: int, stop: int, units: set[int], last: dict[int, int]
    ) -> list[RunStep]:
        """The steps of operators [first, stop), each with the values that it is the last to take."""
        graph, found, at = self.graph, list[RunStep](), first
        while at < stop:
            called = next((number for number in graph.nodes[at].frames if number in units), None)
            end = at + 1 if called is None else graph.frames[called].last
            active = [proved[number] for number in range(at, end) if number in proved]
            if active and called is None:
                found.append(self._step_of(active[0]))
            elif active:
                within = self._within(proved, at, end, units - {called}, last)  # type: ignore[arg-type]
                found.append(self._unit(called, within, active, last))  # type: ignore[arg-type]
            if active:
                touched = {number for step in active for number in (*step.used, *step.made)}
                found[-1].drops = [number for number in touched if last.get(number, -1) < end]
            at = end
        return found

    def _unit(
        self, number: int, within: Sequence[RunStep], steps: Sequence[ProgramStep], last: dict[int, int]
    ) -> RunStep:
        frame, values = self.graph.frames[number], self.graph.values
        made = [value for step in steps for value in step.made]
        used = {value for step in steps for value in step.used} - {*made}
        reads = [n for n in sorted(used) if n >= len(values) or values[n].kind in ("operator", "input")]
        return unit(frame, within, reads, [n for n in made if last.get(n, -1) >= frame.last])

    def _step_of(self, step: ProgramStep) -> RunStep:
        node, of = step.node, functools.partial
        return operator(
            node,
            step.run or replayed(node, self.graph, self.written),
            Insertion(
                of(self._given, step) if step.taken or step.wants else None,
                of(self._seeded, step) if step.draws or step.apart else None,
                of(self._take, step.parts) if step.parts else None,
            ),
        )

    # ---- what the axis inserts ----

    def _given(self, step: ProgramStep, values: Values) -> Callable[[Ref], Any]:
        """What finds the arguments of an operator, where it needs them."""

        def given(ref: Ref) -> Any:
            part, place = step.taken.get(ref.value), step.wants.get(ref.value)
            if part is not None:
                return values[part]
            found = values.resolve(ref)
            return found if place is None else self._placed(ref.value, found, place, step.node)

        return given

    def _placed(self, number: int, value: Tensor, place: SequenceDim, node: Node) -> Tensor:
        known, ranks = self.places.get(number), self._ranks
        if known is None:
            return take(value, place, ranks.place)
        shape, label = self.graph.values[number].shape, label_of("positions", self.graph, node)
        if (known.dim, known.outer, known.span.size) != (place.dim, place.outer, place.span.size):
            return take(gathered(value, shape, known, ranks, label), place, ranks.place)
        return move(value, shape, known, place.span, ranks, label)

    def _seeded(self, step: ProgramStep, values: Values) -> AbstractContextManager[None]:
        """Seed what an operator draws, where the generators are not already those of this rank."""
        where: list[int | str] = [] if step.draws else [self._ranks.place]
        if step.apart and self._axis.parts is not None:
            where += ["tensor", self._axis.parts.axis.place]
        return self._axis.drawing(values.seed, step.node.number, *where)

    def _take(self, parts: Sequence[tuple[int, int, SequenceDim]], values: Values) -> None:
        """Take this rank's parts of whole values."""
        for number, part, place in parts:
            values[part] = take(values[number], place, self._ranks.place)

    # ---- runs ----

    def forward(self, root: Any, number: int, came: Sequence[Tensor], inputs: Any, targets: Any) -> Any:
        """What a stage sends, or what the program returns. Under gradients a model's output without a loss
        is this rank's part of what is cut; else it is whole on every rank.
        """
        seed = drawn_seed()
        given = [*tensors_in((inputs, targets) if self.ends_with_loss else inputs)]
        with self._axis.drawing(seed, self._ranks.place):
            if len(self.stages) > 1:

                def run(here: Any, came: Sequence[Tensor], _inputs: Any) -> Any:
                    return self._run_on(here, number, came, given, seed)

                found = root(number, tuple(came), (), ForwardCall(run))
            else:
                whole_model = ForwardCall(lambda *given: self._run_on(self._axis, 0, (), given, seed))
                found = root(whole_model, *given)
        if self.ends_with_loss or number + 1 < len(self.stages) or torch.is_grad_enabled():
            return found
        numbers = iter(self.graph.outputs)

        def joined(value: Tensor) -> Tensor:
            at = next(numbers)
            place, shape = self.places.get(at), self.graph.values[at].shape
            return value if place is None else whole(value, shape, place, self._ranks, "up::positions|output")

        return mapped(found, joined)

    def _run_on(self, model: RunningModel, number: int, came: Any, inputs: Any, seed: int | None) -> Any:
        parts = self._axis.parts
        return self.run(number, model if parts is None else parts.of(model), came, inputs, seed)

    def sends_unused(self, _number: int) -> bool:
        """Operators take what comes."""
        return False

    def _told(self, number: int) -> Any:
        return super()._told(number), self.places.get(number)


def _draws(node: Node) -> bool:
    return node.name in DRAWS or (node.name == ATTENTION and node.named["dropout_p"] > 0)
