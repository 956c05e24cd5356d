"""Runs the cut program on shapes, and compares it with the whole one, operator by operator.

Every operator must be the same, with the shapes that the cut says and the same other arguments. Where the
programs differ, the cut is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .capture import CaptureError, Shapes
from .choice import SplitChoice
from .containers import Slot, mapped
from .local_model import LocalModel, ProgramMismatch, groups_of_part, slice_bounds
from .program import Frame, Graph, Node, Ref, refs
from .rules import GROUP_NORM, NEW, slice_of
from .sequence import ScatteredPositions

SIZED = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand", "aten.split", "aten.split_with_sizes",
    "aten._reshape_alias", *NEW,
}  # fmt: skip


def compare(
    choice: SplitChoice,
    shapes: Shapes,
    sample: Any,
    forward: Callable[[Any], Any] | None,
    positions: ScatteredPositions | None = None,
) -> None:
    """Run `shapes.model`, not yet cut, as `choice.cut` says; give that the written sizes that must change.

    Args:
        positions: what is cut along the sequence.
    Raises:
        ProgramMismatch: the programs differ.
    """
    run = LocalModel(choice, shapes)
    whole = choice.graph
    try:
        local = run.recorder.run(shapes.model, sample, forward)
    except CaptureError as error:
        if positions is not None:  # what it raises follows from where it went another way first
            _Comparison(choice, run.recorder.graph, positions).run(begun=True)
        if isinstance(error.__cause__, ProgramMismatch):
            raise error.__cause__ from None
        at = min(len(run.recorder.graph.nodes), len(whole.nodes) - 1)
        raise ProgramMismatch(whole.nodes[at], f"its parts do not fit the program: {error}") from error
    _Comparison(choice, local, positions).run()
    choice.cut.sizes, choice.cut.calls = run.sizes, run.calls


class _Comparison:
    """Two programs, operator by operator. Copies (clone) are left out: they depend on strides."""

    def __init__(self, choice: SplitChoice, local: Graph, positions: ScatteredPositions | None) -> None:
        self._choice, self._whole, self._local = choice, choice.graph, local
        self._positions = positions
        self._same: dict[int, int] = {}  # value of the whole program, or copy of one -> that one
        self._of: dict[int, int] = {}  # value of the local program -> that of the whole one
        for value in local.values:
            if value.kind in ("parameter", "buffer", "input"):
                self._of[value.number] = value.number
        self._gathered = {
            number
            for frame in self._whole.frames
            if choice.cut.modules.get(frame.path) == "column, gathered"
            for number in frame.outputs
        }

    def run(self, *, begun: bool = False) -> None:
        """Raise ProgramMismatch where they differ. `begun`: the local one has not ended."""
        if not begun and self._choice.cut.moves and len(self._whole.frames) != len(self._local.frames):
            raise ProgramMismatch(self._whole.nodes[-1], "the program of the parts calls other modules")
        nodes = self._without_copies(self._whole, self._same)
        copies: dict[int, int] = {}
        others = self._without_copies(self._local, copies)
        for node, other in zip_longest(nodes, others):
            if other is None and begun:
                return
            if node is None or other is None:
                at = node or nodes[-1]
                raise ProgramMismatch(
                    at, f"the program of the parts is {'longer' if node is None else 'shorter'}"
                )
            self._pair(node, other, copies)
        for frame, here in zip(self._whole.frames, self._local.frames, strict=False):
            self._moves(frame, here, copies)
        self._outputs()

    def _outputs(self) -> None:
        """Whether each rank returns all of what the model returns."""
        for number, there in zip(self._whole.outputs, self._local.outputs, strict=True):
            shape, here = self._whole.values[number].shape, self._local.values[there].shape
            if shape != here:
                node = self._whole.nodes[self._whole.values[number].node]
                raise ProgramMismatch(node, f"it returns {list(here)} where {list(shape)} is expected")

    def _moves(self, frame: Frame, other: Frame, copies: dict[int, int]) -> None:
        """Whether each move of a call of a module got the value that it is for."""
        for out, slot in self._choice.cut.moves.get(frame.path, {}):
            mine, theirs = (_at(each, slot, out=out) for each in (frame, other))
            if mine is None and theirs is None:  # this call has none there
                continue
            found = None if theirs is None else self._of.get(self._source(theirs, copies))
            if mine is None or found is None or self._same.get(found, found) != self._same.get(mine, mine):
                node = self._whole.nodes[min(frame.first, len(self._whole.nodes) - 1)]
                raise ProgramMismatch(node, f'"{frame.path}" takes or returns other values')

    def _source(self, number: int, copies: dict[int, int]) -> int:
        """What a copy, or a stand-in, of the local program was made of."""
        while (before := self._local.stand_ins.get(number, copies.get(number, number))) != number:
            number = before
        return number

    @staticmethod
    def _without_copies(graph: Graph, same: dict[int, int]) -> list[Node]:
        kept = []
        for node in graph.nodes:
            if node.name == "aten.clone" and node.outputs[0] is not None:
                source = node.args[0].value
                same[node.outputs[0]] = same.get(source, source)
            else:
                kept.append(node)
        return kept

    def _pair(self, node: Node, other: Node, copies: dict[int, int]) -> None:
        if (_kind(node), self._whole.module_of(node)) != (_kind(other), self._local.module_of(other)):
            raise ProgramMismatch(node, f"the program of the parts does {other.name} in place of {node.name}")
        mine = node.taken
        theirs = [ref.value for ref in refs((other.args, other.named))]
        if len(mine) != len(theirs):
            raise ProgramMismatch(node, f"{node.name} takes other values in the program of the parts")
        for number, there in zip(mine, theirs, strict=True):
            shape = self._local.values[there].shape
            self._value(node, number, self._source(there, copies), shape)
        self._arguments(node, other)
        for mine_out, their_out in zip(node.outputs, other.outputs, strict=True):
            if mine_out is not None and their_out is not None:
                self._of[their_out] = mine_out

    def _value(self, node: Node, number: int, there: int, shape: tuple[int, ...]) -> None:
        known = self._same.get(number, number)
        if self._local.values[there].kind == "constant" and self._whole.values[known].kind == "constant":
            if not _equal(self._whole.constants.get(known), self._local.constants.get(there)):
                raise ProgramMismatch(node, f"{node.name} takes another constant in the program of the parts")
            self._of.setdefault(there, known)
        found = self._of.get(there)
        if found is None or self._same.get(found, found) != known:
            raise ProgramMismatch(node, f"{node.name} takes other values in the program of the parts")
        wanted = self._choice.local(number)
        if self._positions is not None:
            wanted = self._positions.taken(node, number, wanted)
        if shape != wanted and not (known in self._gathered and shape == self._whole.values[known].shape):
            raise ProgramMismatch(
                node,
                f"its part is {list(shape)} where {list(wanted)} is expected, before {node.name}",
            )

    def _arguments(self, node: Node, other: Node) -> None:
        if node.name == "aten.slice":
            here, wanted = self._bounds(node, other)
            if here != wanted:
                raise ProgramMismatch(node, f"its part takes elements {here} where {wanted} are expected")
        elif node.name == GROUP_NORM:
            if (groups_of_part(self._choice, node), node.args[7:]) != (other.args[6], other.args[7:]):
                raise ProgramMismatch(node, f"its part has other groups than {node.args[6]} in all")
        elif _plain(node) != _plain(other):
            raise ProgramMismatch(node, f"{node.name} has other arguments in the program of the parts")

    def _bounds(self, node: Node, other: Node) -> tuple[list[int], list[int]]:
        """The elements that a slice takes, and those that it must take."""
        bounds = slice_bounds(self._choice, node)
        _, dim, start, stop, step = slice_of(other)
        size = self._local.values[other.args[0].value].shape[dim or 0]
        here = list(slice(start, stop, step).indices(size)[:2])
        _, _, first, last, _ = slice_of(node)
        return here, list(slice(first, last).indices(size)[:2]) if bounds is None else bounds[1]


def _at(frame: Frame, slot: Slot, *, out: bool) -> int | None:
    """The value that a call takes, or returns, at a slot."""
    values = frame.outputs if out else frame.inputs
    return dict(zip(frame.slots[out], values, strict=True)).get(slot)


def _kind(node: Node) -> str:
    """The operator; views are one kind, however they are made."""
    return "aten.view" if node.name in ("aten._unsafe_view", "aten._reshape_alias") else node.name


def _equal(one: Any, other: Any) -> bool:
    """Whether two constants are one attribute of the model, or have the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one, other))
    return one is not None and one == other


def _plain(node: Node) -> str:
    """The arguments that are no tensors, nor sizes."""
    if node.name not in SIZED:
        return repr(mapped((node.args, node.named), lambda _: None, Ref))
    filled = {"aten.full": 1, "aten.new_full": 2}.get(node.name)
    fill = (
        node.args[filled] if filled is not None and len(node.args) > filled else node.named.get("fill_value")
    )
    return repr(fill) + repr({key: node.named[key] for key in ("dtype", "generator") if key in node.named})
