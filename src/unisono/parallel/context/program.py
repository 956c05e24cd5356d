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
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.noted_call import CHECKS, EXPERT_LIST
from unisono.parallel.graph.program import HOOKS, Ref, refs, writes_of
from unisono.parallel.graph.rules import DRAWS, slice_of
from unisono.parallel.graph.stage_program import Stage, StageProgram

from .call import ContextError, RuleCall, refusal, warn_of
from .gathers import on_all
from .layout import LayoutError, PositionSpan, SequenceDim, local_shape
from .replay import ProgramStep, Replay, ReplayModel, ReplayValues, UnitItem
from .rules import ATTENTION, WholeMemory, run_rule

if TYPE_CHECKING:
    from unisono.parallel.costs.collectives import Link
    from unisono.parallel.graph.program import Frame, Graph, Node
    from unisono.parallel.graph.stage_program import StageStart

    from .exchange import ContextGroup

__all__ = ["ContextProgram"]

STATE = ("parameter", "buffer")
NEW = {  # operators that make memory -> the place of its sizes among their arguments
    **dict.fromkeys(("aten.new_empty", "aten.new_zeros", "aten.new_ones", "aten.new_full"), 1),
    **dict.fromkeys(("aten.empty", "aten.zeros", "aten.ones", "aten.full"), 0),
}


class ContextStage(NamedTuple):
    """What a stage of a pipeline runs: operators and calls of units. `stage` None: the whole program."""

    items: list[Any]
    stage: Stage | None


class ContextProgram:
    """One recorded program, proved for the ranks of a context group.

    Args:
        graph: of inputs whose first tensors are those of the model: `sequences` of them have, if they have
            two dims, the sequence in dim 1.
        units: modules (paths) that are called.
        pipeline: where its stages but the first begin, and a copy of the model; None: there is one stage.
    Attributes:
        places: where the values that are cut have the sequence.
        stages: what each stage of a pipeline runs.
        notes: what is not cut, though it has the sequence -> why.
    Raises:
        ContextError: it cannot be cut.
    """

    def __init__(
        self,
        graph: Graph,
        sequences: int,
        units: frozenset[str],
        ranks: ContextGroup,
        link: Link,
        pipeline: tuple[Sequence[StageStart], nn.Module] | None = None,
    ) -> None:
        self.graph, self._ranks, self._link = graph, ranks, link
        self._plain: dict[int, Callable[..., Any]] = {}
        self._written = {
            graph.values[before].storage for node in graph.nodes for before, _ in writes_of(node)
        }
        self._check()
        self.notes: dict[str, str] = {}
        self._filled: dict[int, SequenceDim] = {}  # new memory that gets parts of the sequence
        steps = self._steps(sequences)
        if not self.places:
            raise ContextError(
                f"nothing in the program of {graph.model} can be cut along a sequence: no input of two "
                "dimensions, [rows, positions], meets a parameter. Leave out context="
            )
        self._inputs = [value.number for value in graph.values if value.kind == "input"]
        self._leave_out(steps)
        if self._ranks.rank == 0:
            warn_of(self.graph, [n for n in self._on_all if not steps[n.number].idle], self._ranks.ranks)
        self._parts: list[tuple[int, int, SequenceDim]] = []
        if pipeline is None:
            self._parts = self._take_once(steps)
            self.stages = [self._stage(steps, None, units, 0, len(steps))]
            return
        starts, model = pipeline
        found = StageProgram(graph, model, starts, operators=True)
        bounds = [0, *found.places, len(steps)]
        self.stages = [
            self._stage(steps, stage, units, *both)
            for stage, both in zip(found.stages, itertools.pairwise(bounds), strict=True)
        ]

    # ---- proof ----

    def _refuse(self, node: Node, why: str) -> ContextError:
        return refusal(self.graph, node, why, self._ranks.ranks)

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
                f"{self._ranks.ranks} would lose: its program runs operator by operator. Leave out context="
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

    def _steps(self, sequences: int) -> list[ProgramStep]:
        """Prove all operators; again, where memory turns out to be filled by parts of the sequence."""
        while True:
            self._begin(sequences)
            try:
                return [self._step(node) for node in self.graph.nodes]
            except WholeMemory as found:
                self._filled[found.value] = found.place

    def _begin(self, sequences: int) -> None:
        ranks = self._ranks.ranks
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
            if node.name in NEW:
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
        sizes, at = local_shape(self.graph.values[number].shape, place, self._ranks.rank), NEW[node.name]
        op = node.op
        return ProgramStep(node, run=lambda *args, **named: op(*args[:at], sizes, *args[at + 1 :], **named))

    def _step(self, node: Node) -> ProgramStep:
        if node.outputs and node.outputs[0] in self._filled:
            return self._fill(node, self._filled[node.outputs[0]])
        given = {ref.value for ref in refs((node.args, node.named))}
        cut = {number: self.places[number] for number in given if number in self.places}
        marked = {number: self._whole[number] for number in given if number in self._whole}
        trained = bool(given & self._trained)
        begins = not cut and bool(marked) and trained
        made = [number for number in node.outputs if number is not None]
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
        call = RuleCall(self.graph, node, cut or marked, self._ranks, self._link, self._written, whole)
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
        call = RuleCall(self.graph, node, marked, self._ranks, self._link, self._written, whole=True)
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
            if place.span.length < 2 * self._ranks.ranks:
                raise self._refuse(
                    node,
                    f"its sequence has {place.span.length} positions, and {self._ranks.ranks} ranks take "
                    f"{2 * self._ranks.ranks} parts",
                )

    # ---- items ----

    def _leave_out(self, steps: Sequence[ProgramStep]) -> None:
        """Find what nothing takes, such as a causal mask beside is_causal=True."""
        needed = set(self.graph.outputs)
        for step in reversed(steps):
            node = step.node
            runs = node.name in CHECKS or _draws(node) or writes_of(node)
            step.idle = not (runs or needed.intersection(node.outputs))
            if not step.idle:
                needed |= step.used

    def _take_once(self, steps: Sequence[ProgramStep]) -> list[tuple[int, int, SequenceDim]]:
        """Have a part of a whole value taken where the value is made; return the parts of inputs.

        Memory that is written in place is taken where it is needed, as are parameters.
        """
        parts: dict[tuple[int, SequenceDim], int] = {}
        inputs: list[tuple[int, int, SequenceDim]] = []
        for step in [one for one in steps if not one.idle]:
            for number, place in step.wants.items():
                value = self.graph.values[number]
                late = value.storage in self._written or value.kind not in ("operator", "input")
                if number in self.places or late:
                    continue
                if (number, place) not in parts:
                    part = parts[number, place] = len(self.graph.values) + len(parts)
                    there = inputs if value.kind == "input" else steps[value.node].parts
                    there.append((number, part, place))
                step.taken[number] = parts[number, place]
        return inputs

    def _stage(
        self, steps: Sequence[ProgramStep], stage: Stage | None, units: frozenset[str], first: int, stop: int
    ) -> ContextStage:
        """What a stage runs, of operators [first, stop) and of those that any stage can run. None: all."""
        here = {item.first for item in stage.items} if stage is not None else set(range(len(steps)))
        mine = [replace(step, idle=step.idle or step.node.number not in here) for step in steps]
        last = {number: step.node.number for step in mine if not step.idle for number in step.used}
        last |= dict.fromkeys(
            self.graph.outputs if stage is None else (*stage.goes, *stage.result), len(mine)
        )
        called = {
            frame.number
            for frame in self.graph.frames
            if frame.path in units and first <= frame.first < frame.last <= stop
        }
        return ContextStage(self._items(mine, 0, len(mine), called, last), stage)

    def _items(
        self, steps: Sequence[ProgramStep], first: int, stop: int, units: set[int], last: dict[int, int]
    ) -> list[Any]:
        """The items of operators [first, stop), each with the values that it is the last to take."""
        graph, found, at = self.graph, list[Any](), first
        while at < stop:
            unit = next((number for number in graph.nodes[at].frames if number in units), None)
            end = at + 1 if unit is None else graph.frames[unit].last
            active = [step for step in steps[at:end] if not step.idle]
            if not active:
                at = end
                continue
            if unit is None:
                found += active
            else:
                within = self._items(steps, at, end, units - {unit}, last)
                found.append(self._unit(graph.frames[unit], within, active, last))
            touched = {number for step in active for number in (*step.used, *step.made)}
            found[-1].drops = [number for number in touched if last.get(number, -1) < end]
            at = end
        return found

    def _unit(
        self, frame: Frame, items: list[Any], steps: Sequence[ProgramStep], last: dict[int, int]
    ) -> UnitItem:
        made = [number for step in steps for number in step.made]
        used = {number for step in steps for number in step.used} - {*made}
        values = self.graph.values
        reads = [n for n in sorted(used) if n >= len(values) or values[n].kind in ("operator", "input")]
        return UnitItem(frame, items, reads, [n for n in made if last.get(n, -1) >= frame.last])

    # ---- run ----

    def replay(self, model: ReplayModel, shared: int) -> Replay:
        """What a run needs. shared: a seed, the same on the ranks of the group."""
        return Replay(self.graph, self.places, self._written, self._ranks, model, shared, self._plain)

    def run(self, replay: Replay, stage: int, came: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What a stage sends, or what the recorded program returned: this rank's part of what is cut.

        Args:
            came: from the stage before.
            inputs: whole.
        """
        here = self.stages[stage]
        values = ReplayValues(replay)
        values.update(zip(self._inputs, inputs, strict=True))
        values.take(self._parts)
        if here.stage is not None:
            values.update(zip(here.stage.comes, came, strict=True))
            values.update((number, values[number].clone()) for number in here.stage.fresh)
        values.run(here.items)
        if here.stage is None or stage + 1 == len(self.stages):
            return mapped(self.graph.result, values.get_ref, Ref)
        passing = here.stage.comes
        return tuple(values[n].view_as(values[n]) if n in passing else values[n] for n in here.stage.goes)

    @functools.cached_property
    def digest(self) -> str:
        """What all ranks must have alike, as a short text."""
        graph = self.graph
        flat = [
            (node.name, [(graph.values[n].shape, self.places.get(n)) for n in node.outputs if n is not None])
            for node in graph.nodes
        ]
        sent = [(one.stage.comes, one.stage.goes) for one in self.stages if one.stage is not None]
        return hashlib.blake2b(repr((flat, sent)).encode(), digest_size=16).hexdigest()


def _draws(node: Node) -> bool:
    return node.name in DRAWS or (node.name == ATTENTION and node.named["dropout_p"] > 0)
