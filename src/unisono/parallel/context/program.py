"""A recorded program on the ranks of a context group: what is cut, proved operator by operator, and its run.

Every rank gets whole inputs. A value without the sequence, such as a mask or positions, is computed whole on
each rank. The cut begins where a value with the sequence of an input meets a parameter: each rank takes its
positions there. From then on each operator runs on these, as its rule says (rules.py). What has no rule is
refused. The operators that were proved are those that run, so there is no other program to be wrong.

    ids [2, 64] -> embedding: cut, [2, 16, 8] on each of 4 ranks -> ... -> logits -> nll_loss: a sum over ranks
    arange -> embedding: whole, [64, 8] -> added to the former: its 16 positions are taken

Modules with states between ranks (units) are called, with a `UnitCall` in front of the values that they take.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel.generators import drawing, seed_of
from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.program import Ref, refs, writes_of
from unisono.parallel.graph.rules import DRAWS

from .exchange import move, take
from .layout import LayoutError, Place, Span
from .rules import ATTENTION, Call, label_of, run_rule

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Frame, Graph, Node
    from unisono.parallel.layouts.cost import Link

    from .exchange import ContextGroup

__all__ = ["ContextError", "ContextProgram", "ForwardCall"]

STATE = ("parameter", "buffer")
OF_ATTENTION = ("aten.mm", "aten.bmm", "aten.baddbmm", "aten._softmax", "aten._safe_softmax")
WRITTEN_OUT = (
    "Write attention by torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
    'attn_implementation="sdpa"), or leave out context='
)
ELSE = "What is no attention has to work position by position: change that line, or leave out context="


class ContextError(ValueError):
    """A program that cannot be cut along the sequence; the text names the operator and the line."""


@dataclass
class _Step:
    """One operator.

    Attributes:
        wants: value -> where this operator needs it.
        run: what runs in place of the operator.
        draws: random numbers for a value that all ranks have.
        taken: value -> the number of the part of it that is taken once for all operators.
        parts: (value, the number of its part, where), taken when this operator has made the value.
        drops: values that nothing takes afterwards.
    """

    node: Node
    wants: dict[int, Place] = field(default_factory=dict)
    run: Any = None
    draws: bool = False
    taken: dict[int, int] = field(default_factory=dict)
    parts: list[tuple[int, int, Place]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)

    @property
    def used(self) -> set[int]:
        """The values that it takes."""
        return {self.taken.get(ref.value, ref.value) for ref in refs((self.node.args, self.node.named))} | {
            value for value, _, _ in self.parts
        }

    @property
    def made(self) -> list[int]:
        """The values that are there afterwards."""
        return [n for n in self.node.outputs if n is not None] + [part for _, part, _ in self.parts]


@dataclass
class _UnitItem:
    """One call of a unit."""

    frame: Frame
    items: list[Any]
    reads: list[int]
    makes: list[int]
    drops: list[int] = field(default_factory=list)


class ContextProgram:
    """One recorded program, proved for the ranks of a context group.

    Args:
        graph: of inputs whose first tensors are those of the model: `sequences` of them have, if they have
            two dims, the sequence in dim 1.
        units: modules (paths) that are called.
    Attributes:
        places: where the values that are cut have the sequence.
    Raises:
        ContextError: it cannot be cut.
    """

    def __init__(
        self, graph: Graph, sequences: int, units: frozenset[str], ranks: ContextGroup, link: Link
    ) -> None:
        self.graph, self._ranks, self._link = graph, ranks, link
        self.places: dict[int, Place] = {}
        self._whole: dict[int, Place] = {}  # values that every rank has, and that have an input's sequence
        self._trained: set[int] = set()  # those that depend on parameters
        self._written = {
            graph.values[before].storage for node in graph.nodes for before, _ in writes_of(node)
        }
        self._check()
        self._begin(sequences)
        steps = [self._step(node) for node in graph.nodes]
        if not self.places:
            raise ContextError(
                f"nothing in the program of {graph.model} can be cut along a sequence: no input of two "
                "dimensions, [rows, positions], meets a parameter. Leave out context="
            )
        self._inputs = [value.number for value in graph.values if value.kind == "input"]
        self._parts = self._take_once(steps)
        last = {number: step.node.number for step in steps for number in step.used}
        last |= dict.fromkeys(graph.outputs, len(steps))
        self.items = self._items(steps, 0, len(steps), frozenset(), units, last)

    # ---- proof ----

    def _refuse(self, node: Node, why: str) -> ContextError:
        module = self.graph.module_of(node)
        where = f' in "{module}"' if module else ""
        return ContextError(
            f"context={self._ranks.ranks} cannot cut {node.name}{where} along the sequence: {why}, at "
            f"{node.line}. {WRITTEN_OUT if node.name in OF_ATTENTION else ELSE}"
        )

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
        for name, number in graph.rebound.items():
            raise self._refuse(graph.nodes[graph.values[number].node], f'it replaces the buffer "{name}"')
        for node in graph.nodes:
            for ref in refs((node.args, node.named)):
                if graph.values[ref.value].kind == "constant" and graph.constants[ref.value] is None:
                    raise self._refuse(node, "it takes a tensor that was made outside of the program")
            for before, _ in writes_of(node):
                if graph.values[graph.values[before].storage].kind in (*STATE, "constant"):
                    raise self._refuse(node, "it writes into a buffer, or into a tensor that is not its own")

    def _begin(self, sequences: int) -> None:
        ranks = self._ranks.ranks
        inputs = [value for value in self.graph.values if value.kind == "input"][:sequences]
        for value in inputs:
            if len(value.shape) > 1 and value.shape[1] > 1:
                self._whole[value.number] = Place(1, 1, Span(value.shape[1], 0, value.shape[1], ranks))
        self._trained = {value.number for value in self.graph.values if value.kind == "parameter"}

    def _step(self, node: Node) -> _Step:
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
            return _Step(node, draws=_draws(node))
        if begins:
            self._check_length(node, marked)
        call = Call(self.graph, node, cut or marked, self._ranks, self._link)
        try:
            found = run_rule(call)
        except LayoutError as error:
            raise self._refuse(node, str(error)) from None
        wants = (marked if begins else {}) | call.wants
        for number, place in zip(node.outputs, found, strict=True):
            if number is not None and place is not None:
                self.places[number] = place
            elif number is not None:
                self._trained.add(number)
        for before, after in writes_of(node):
            if before in wants:
                raise self._refuse(node, "it writes a part of the sequence into a value that every rank has")
        draws = _draws(node) and not any(number in self.places for number in made)
        return _Step(node, wants, call.run, draws=draws)

    def _follow(self, node: Node, marked: dict[int, Place]) -> None:
        """Follow an input's sequence through values that are not cut yet, as far as rules do."""
        call = Call(self.graph, node, marked, self._ranks, self._link)
        with contextlib.suppress(LayoutError, StopIteration):
            found = run_rule(call)
            for number, place in zip(node.outputs, found, strict=True):
                if number is not None and place is not None:
                    self._whole[number] = place

    def _check_length(self, node: Node, marked: dict[int, Place]) -> None:
        for place in marked.values():
            if place.span.length < 2 * self._ranks.ranks:
                raise self._refuse(
                    node,
                    f"its sequence has {place.span.length} positions, and {self._ranks.ranks} ranks take "
                    f"{2 * self._ranks.ranks} parts",
                )

    # ---- items ----

    def _take_once(self, steps: Sequence[_Step]) -> list[tuple[int, int, Place]]:
        """Have a part of a whole value taken where the value is made; return the parts of inputs.

        Memory that is written in place is taken where it is needed, as are parameters.
        """
        parts: dict[tuple[int, Place], int] = {}
        inputs = []
        for step in steps:
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

    def _items(
        self, steps: Sequence[_Step], first: int, stop: int, inside: frozenset[int], units: frozenset[str],
        last: dict[int, int],
    ) -> list[Any]:  # fmt: skip
        """The items of operators [first, stop), each with the values that it is the last to take."""
        graph, found, at = self.graph, list[Any](), first
        while at < stop:
            unit = next(
                (n for n in graph.nodes[at].frames if n not in inside and graph.frames[n].path in units), None
            )
            if unit is None:
                found.append(steps[at])
                end = at + 1
            else:
                frame = graph.frames[unit]
                end = frame.last
                within = self._items(steps, at, end, inside | {unit}, units, last)
                found.append(self._unit(frame, within, steps[at:end], last))
            touched = {number for step in steps[at:end] for number in (*step.used, *step.made)}
            found[-1].drops = [number for number in touched if last.get(number, -1) < end]
            at = end
        return found

    def _unit(
        self, frame: Frame, items: list[Any], steps: Sequence[_Step], last: dict[int, int]
    ) -> _UnitItem:
        made = [number for step in steps for number in step.made]
        used = {number for step in steps for number in step.used} - {*made}
        values = self.graph.values
        reads = [n for n in sorted(used) if n >= len(values) or values[n].kind in ("operator", "input")]
        return _UnitItem(frame, items, reads, [n for n in made if last.get(n, -1) >= frame.last])

    # ---- run ----

    def run(self, where: dict[str, nn.Module], shared: int, device: str, *inputs: Tensor) -> Any:
        """What the recorded program returned, with this rank's part of what is cut.

        Args:
            where: the modules of the model that runs, by path.
            shared: a seed, the same on the ranks of the group.
            inputs: whole.
        """
        values = _Values(self, where, shared, device)
        values.update(zip(self._inputs, inputs, strict=True))
        values.take(self._parts)
        values.run(self.items)
        return mapped(self.graph.result, values.get_ref, Ref)

    @functools.cached_property
    def digest(self) -> str:
        """What all ranks must have alike, as a short text."""
        graph = self.graph
        flat = [
            (node.name, [(graph.values[n].shape, self.places.get(n)) for n in node.outputs if n is not None])
            for node in graph.nodes
        ]
        return hashlib.blake2b(repr(flat).encode(), digest_size=16).hexdigest()


def _draws(node: Node) -> bool:
    return node.name in DRAWS or (node.name == ATTENTION and node.named["dropout_p"] > 0)


class ForwardCall:
    """Stands in front of the values that a module is called with: its forward is `run` of them.

    No dataclass and no tuple: what `fully_shard` looks through for tensors.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


class _Values(dict[int, Tensor]):
    """The tensors of one run by their numbers in the graph: whole, or this rank's part."""

    def __init__(
        self, program: ContextProgram, where: dict[str, nn.Module], shared: int, device: str
    ) -> None:
        super().__init__()
        self._program, self._where, self._shared, self._device = program, where, shared, device

    def unit(self, item: _UnitItem, *came: Tensor) -> tuple[Tensor, ...]:
        """Run a unit on the values that it takes; return those that are there afterwards."""
        inner = _Values(self._program, self._where, self._shared, self._device)
        inner.update(zip(item.reads, came, strict=True))
        inner.run(item.items)
        return tuple(inner[number] for number in item.makes)

    def get_ref(self, ref: Ref) -> Any:
        """A value; parameters, buffers and constants are where the model has them now."""
        found = self.get(ref.value)
        if found is not None:
            return found
        graph = self._program.graph
        value = graph.values[ref.value]
        if value.kind == "constant":
            constant = graph.constants[ref.value]
            if isinstance(constant, tuple):
                return getattr(self._where[constant[0]], constant[1])
            assert constant is not None, "a constant has no values"
            return constant
        path, _, leaf = value.name.rpartition(".")
        return getattr(self._where[path], leaf)

    def run(self, items: Sequence[Any]) -> None:
        """Run operators and units in order."""
        for item in items:
            what = item.node if isinstance(item, _Step) else item.frame
            with contextlib.nullcontext() if what.grad else torch.no_grad():
                if isinstance(item, _Step):
                    self._operator(item)
                else:
                    unit = self._where[item.frame.path]
                    made = unit(
                        ForwardCall(functools.partial(self.unit, item)),
                        *(self[number] for number in item.reads),
                    )
                    self.update(zip(item.makes, made, strict=True))
            for number in item.drops:
                self.pop(number, None)

    def _operator(self, step: _Step) -> None:
        node = step.node

        def given(ref: Ref) -> Any:
            part, place = step.taken.get(ref.value), step.wants.get(ref.value)
            if part is not None:
                return self[part]
            found = self.get_ref(ref)
            return found if place is None else self._placed(ref.value, found, place, node)

        args, named = mapped((node.args, node.named), given, Ref)
        seed = seed_of(self._shared, node.number)
        with drawing(seed, self._device) if step.draws else contextlib.nullcontext():
            output = (step.run or self._op(node))(*args, **named)
        flat = output if isinstance(output, (tuple, list)) else (output,)
        self.update((n, t) for n, t in zip(node.outputs, flat, strict=True) if n is not None)
        self.take(step.parts)

    def take(self, parts: Sequence[tuple[int, int, Place]]) -> None:
        """Take this rank's parts of whole values."""
        for number, part, place in parts:
            self[part] = take(self[number], place, self._program._ranks.rank)

    def _placed(self, number: int, value: Tensor, place: Place, node: Node) -> Tensor:
        program = self._program
        known = program.places.get(number)
        if known is None:
            return take(value, place, program._ranks.rank)
        label = label_of("positions", program.graph, node)
        shape = program.graph.values[number].shape
        return move(value, shape, known, place.span, program._ranks, label)

    def _op(self, node: Node) -> Any:
        """What runs in place of an operator on whole values: see pipeline/program_stage.py."""
        views = ("aten.view", "aten._unsafe_view", "aten._reshape_alias")
        if node.name in views and isinstance(node.args[1], (list, tuple)):
            return lambda tensor, size, *_: tensor.reshape(size)
        if node.name == "aten.lift_fresh":  # a tensor that is written down is new each time
            return torch.clone
        return node.op
