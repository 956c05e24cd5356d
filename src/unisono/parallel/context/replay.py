"""Runs the operators of a proved program in order: on whole values, or on this rank's part of them.

Under a tensor axis, too, the program is that of one of its ranks: parameters are this rank's parts, and sizes
that the program has written down are changed. What is moved between ranks of the tensor axis is noted as one
operator, on this rank's positions:

    column:   enter -> addmm of a part of the features -> ... attention of some heads ... -> row: addmm -> sum
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel import tensor_moves
from unisono.parallel.generators import drawing, seed_of
from unisono.parallel.graph.local_model import narrow_
from unisono.parallel.graph.noted_call import EXPERT_LIST, EXPERTS, ModuleOp, NotedOp, noted_call
from unisono.parallel.graph.program import refs, replayed, template
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import LocalForward, leaves_of, part_of, run_locally, share

from .call import label_of
from .exchange import gathered, move, take
from .layout import SequenceDim

if TYPE_CHECKING:
    from unisono.parallel.graph.capture import Recorder, Shapes
    from unisono.parallel.graph.cut import Cut, ModuleMove
    from unisono.parallel.graph.program import Filler, Frame, Graph, Node, Ref

    from .exchange import ContextGroup

__all__ = ["CutParts", "ForwardCall", "ProgramStep", "Replay", "ReplayModel", "ReplayValues", "UnitItem"]


@dataclass
class ProgramStep:
    """One operator.

    Attributes:
        wants: value -> where this operator needs it.
        run: what runs in place of the operator.
        draws: random numbers for a value that all ranks have.
        apart: random numbers that are others on each rank of the tensor axis.
        idle: nothing takes what it makes; it does not run.
        taken: value -> the number of the part of it that is taken once for all operators.
        parts: (value, the number of its part, where), taken when this operator has made the value.
        drops: values that nothing takes afterwards.
    """

    node: Node
    wants: dict[int, SequenceDim] = field(default_factory=dict)
    run: Any = None
    draws: bool = False
    apart: bool = False
    idle: bool = False
    taken: dict[int, int] = field(default_factory=dict)
    parts: list[tuple[int, int, SequenceDim]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)

    @functools.cached_property
    def arguments(self) -> Filler:
        """(args, named) of the operator, for the values of one run."""
        return template((self.node.args, self.node.named))

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
class UnitItem:
    """One call of a unit."""

    frame: Frame
    items: list[Any]
    reads: list[int]
    makes: list[int]
    drops: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ReplayModel:
    """The model that runs.

    Args:
        where: its modules by path.
        held: name of a parameter or buffer -> what it is now.
        device: its type.
        parts: this rank's parts of parameters; None: the plan has no tensor axis.
    """

    where: dict[str, nn.Module]
    held: Callable[[str], Any]
    device: str
    parts: CutParts | None


@dataclass(frozen=True)
class Replay:
    """What a run of a program needs.

    Args:
        places: where the values that are cut have the sequence.
        written: memory that some operator writes in place.
        shared: a seed, the same on the ranks of the group.
        plain: operator -> what runs it on tensors of other strides; all runs of a program share it.
    """

    graph: Graph
    places: dict[int, SequenceDim]
    written: set[int]
    ranks: ContextGroup
    model: ReplayModel
    shared: int
    plain: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def runs(self, step: ProgramStep) -> Callable[..., Any]:
        """What runs in place of an operator."""
        if isinstance(step.node.op, ModuleOp):
            return functools.partial(step.run or _CALLS[step.node.name], self.model.where[step.node.op.path])
        if step.run is not None:
            return step.run  # type: ignore[no-any-return]
        found = self.plain.get(step.node.number)
        if found is None:
            found = self.plain[step.node.number] = replayed(step.node, self.graph, self.written)
        return found

    def seeded(self, step: ProgramStep) -> contextlib.AbstractContextManager[None]:
        """Seed what an operator draws, where the generators are not already those of this rank."""
        if not (step.draws or step.apart):
            return contextlib.nullcontext()
        where: list[int | str] = [] if step.draws else [self.ranks.rank]
        if step.apart and self.model.parts is not None:
            where += ["tensor", self.model.parts.axis.place]
        return drawing(seed_of(self.shared, step.node.number, *where), self.model.device)


def _call_experts(
    module: nn.Module,
    rows: Tensor,
    chosen: Tensor,
    weight: Tensor,
    names: Sequence[str | int],
    _parameters: Any,
) -> Any:
    """Call a layer of experts as the model does. names: of its arguments, or their places."""
    given = dict(zip(names, (rows, chosen, weight), strict=True))
    places = sorted(name for name in given if isinstance(name, int))
    named = {name: value for name, value in given.items() if isinstance(name, str)}
    return module(*(given[place] for place in places), **named)


def _call_listed(module: nn.Module, _first: Tensor, args: Any, named: Any, _parameters: Any) -> Any:
    """Call a layer with a list of experts. Its own forward: a unit that it may be is running."""
    return module.forward(*args, **named)


_CALLS: dict[str, Callable[..., Any]] = {EXPERTS: _call_experts, EXPERT_LIST: _call_listed}


class ForwardCall:
    """Stands in front of the values that a module is called with: its forward is `run` of them.

    No dataclass and no tuple: what `fully_shard` looks through for tensors.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


class ReplayValues(dict[int, Tensor]):
    """The tensors of one run by their numbers in the graph: whole, or this rank's part."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def unit(self, item: UnitItem, *came: Tensor) -> tuple[Tensor, ...]:
        """Run a unit on the values that it takes; return those that are there afterwards."""
        inner = ReplayValues(self._replay)
        inner.update(zip(item.reads, came, strict=True))
        inner.run(item.items)
        return tuple(inner[number] for number in item.makes)

    def get_ref(self, ref: Ref) -> Any:
        """A value; parameters, buffers and constants are where the model has them now."""
        found = self.get(ref.value)
        if found is not None:
            return found
        graph, model = self._replay.graph, self._replay.model
        value = graph.values[ref.value]
        if value.kind == "constant":
            constant = graph.constants[ref.value]
            if isinstance(constant, tuple):
                return getattr(model.where[constant[0]], constant[1])
            if constant is None:
                raise AssertionError("a constant has no values")
            return constant
        held = model.held(value.name)
        return held if model.parts is None else model.parts.local(value.name, held)

    def run(self, items: Sequence[Any]) -> None:
        """Run operators and units in order."""
        for item in items:
            what = item.node if isinstance(item, ProgramStep) else item.frame
            with contextlib.nullcontext() if what.grad else torch.no_grad():
                if isinstance(item, ProgramStep):
                    self._operator(item)
                else:
                    unit = self._replay.model.where[item.frame.path]
                    made = unit(
                        ForwardCall(functools.partial(self.unit, item)),
                        *(self[number] for number in item.reads),
                    )
                    self.update(zip(item.makes, made, strict=True))
            for number in item.drops:
                self.pop(number, None)

    def _operator(self, step: ProgramStep) -> None:
        node = step.node

        def given(ref: Ref) -> Any:
            part, place = step.taken.get(ref.value), step.wants.get(ref.value)
            if part is not None:
                return self[part]
            found = self.get_ref(ref)
            return found if place is None else self._placed(ref.value, found, place, node)

        args, named = step.arguments(given if step.taken or step.wants else self.get_ref)
        with self._replay.seeded(step):
            output = self._replay.runs(step)(*args, **named)
        flat = output if isinstance(output, (tuple, list)) else (output,)
        self.update((n, t) for n, t in zip(node.outputs, flat, strict=True) if n is not None)
        self.take(step.parts)

    def take(self, parts: Sequence[tuple[int, int, SequenceDim]]) -> None:
        """Take this rank's parts of whole values."""
        for number, part, place in parts:
            self[part] = take(self[number], place, self._replay.ranks.rank)

    def _placed(self, number: int, value: Tensor, place: SequenceDim, node: Node) -> Tensor:
        replay = self._replay
        known = replay.places.get(number)
        if known is None:
            return take(value, place, replay.ranks.rank)
        shape = replay.graph.values[number].shape
        label = label_of("positions", replay.graph, node)
        if (known.dim, known.outer, known.span.size) != (place.dim, place.outer, place.span.size):
            return take(gathered(value, shape, known, replay.ranks, label), place, replay.ranks.rank)
        return move(value, shape, known, place.span, replay.ranks, label)


# ---- the tensor axis within a program ----


class CutParts:
    """This rank's parts of what a cut shares.

    Args:
        cut: of the model.
        axis: its tensor axis.
    """

    def __init__(self, cut: Cut, axis: TensorAxis) -> None:
        self.cut, self.axis = cut, axis

    def prepare(self, shapes: Shapes) -> _RecordedCut:
        """Cut a copy without values."""
        return _RecordedCut(shapes, self)

    def local(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a parameter or buffer, by its name; one that is not cut is as it is."""
        dim = self.cut.dims.get(name)
        return value if dim is None else part_of(value, dim, self.axis)


class _RecordedCut:
    """A cut copy of a model, whose moves and regions a recorder notes."""

    def __init__(self, shapes: Shapes, parts: CutParts) -> None:
        self._recorder: Recorder | None = None
        self._open = False
        model, cut = shapes.model, parts.cut
        leaves = leaves_of(model, cut)
        narrow_(shapes, cut)

        def make(path: str, module: nn.Module, dims: dict[str, int]) -> None:
            _RecordedForward(path, module, dims, cut, parts.axis, self)

        run_locally(model, cut, leaves, make)

    def begin(self, recorder: Recorder) -> None:
        """Note the next run in `recorder`."""
        self._recorder, self._open = recorder, False

    # ---- as RngRegion, for LocalForward: a region in which ranks draw other numbers ----

    def begin_region(self) -> bool:
        """A region begins; within one nothing happens, and False returns."""
        assert self._recorder is not None
        if self._open:
            return False
        self._open = True
        self._recorder.graph.apart.append((len(self._recorder.graph.nodes), sys.maxsize))
        return True

    def end_region(self) -> None:
        """It ends."""
        assert self._recorder is not None
        if self._open:
            graph = self._recorder.graph
            graph.apart[-1] = graph.apart[-1][0], len(graph.nodes)
        self._open = False


class _RecordedForward(LocalForward):
    """The forward of a module of the copy."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        dims: dict[str, int],
        cut: Cut,
        axis: TensorAxis,
        recorded: _RecordedCut,
    ) -> None:
        region: Any = SimpleNamespace(begin=recorded.begin_region, end=recorded.end_region)
        super().__init__(path, module, dims, cut, axis, region)

    def _part(self, leaf: str, _dim: int) -> Tensor:
        value: Any = self._module._parameters.get(leaf)
        found: Tensor = self._module._buffers[leaf] if value is None else value
        return found

    def _share(self, bias: Tensor) -> Tensor:
        parts = self._axis.parts
        op = NotedOp("unisono.share", functools.partial(share, parts=parts))
        return noted_call(op, (bias,), lambda: bias / parts)  # type: ignore[no-any-return]

    def _move(self, value: Tensor, move: ModuleMove) -> Tensor:
        kind, dim = move.kind, move.dim % max(value.dim(), 1)
        if kind == "enter" and not value.requires_grad:
            return value

        def run(tensor: Tensor, kind: str, dim: int) -> Tensor:
            return tensor_moves.move(tensor, kind, dim, self._axis, self._label)

        def made() -> Tensor:
            if kind == "enter":
                return value.view_as(value)
            sizes = list(value.shape)
            sizes[dim] *= self._axis.parts if kind.startswith("gather") else 1
            return value.new_zeros(sizes) + value.sum()  # with its gradient

        return noted_call(NotedOp("unisono.tensor_move", run), (value, kind, dim), made)  # type: ignore[no-any-return]
