"""Runs the cut program on shapes, and compares it with the whole one, operator by operator.

The model's code runs again, with each rank's part of the parameters. Every operator must be the same, with
the shapes that the cut says and the same other arguments. A size that the program has written down, such as
the number of heads in a view, is noted and changed. Where the programs differ, the cut is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .capture import CaptureError, Recorder, Shapes
from .choice import Choice
from .containers import mapped
from .cut import Cut, Move, Sizes
from .program import Frame, FunctionCall, Graph, Node, Ref, refs
from .rules import slice_of
from .sequence import ScatteredPositions

__all__ = ["ProgramMismatch", "changed", "compare", "moved", "narrow_"]

SIZED = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand", "aten.split", "aten.split_with_sizes",
    "aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.new_zeros", "aten.new_ones", "aten.new_full",
    "aten.new_empty", "aten.rand", "aten.randn", "aten._reshape_alias", "aten.empty_strided",
}  # fmt: skip
FIRST_SIZES = {"view", "reshape", "expand", "zeros", "ones", "empty", "rand", "randn", "full", "broadcast_to"}
FIRST_SIZES |= {"new_zeros", "new_ones", "new_empty", "new_full"}


class ProgramMismatch(Exception):
    """The cut program is another one. Args: the operator of the whole program where they differ, why."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


def compare(
    choice: Choice,
    shapes: Shapes,
    sample: Any,
    forward: Callable[[Any], Any] | None,
    positions: ScatteredPositions | None = None,
) -> dict[str, dict[int, Sizes]]:
    """Run `shapes.model`, not yet cut, as `choice.cut` says; return the written sizes that must change.

    Args:
        positions: what is cut along the sequence.
    Raises:
        ProgramMismatch: the programs differ.
    """
    run = _LocalModel(choice, shapes)
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
    return run.sizes


class _LocalModel:
    """The model's copy on one rank.

    Attributes:
        sizes: by module, the number of the call in its forward, what is to be changed.
    """

    def __init__(self, choice: Choice, shapes: Shapes) -> None:
        self._choice, self._shapes = choice, shapes
        self.sizes: dict[str, dict[int, Sizes]] = {}
        self.recorder = Recorder(shapes, self._watch)
        narrow_(shapes, choice.cut)
        for path, kind in choice.cut.modules.items():
            if kind == "column, gathered":
                self._gather(shapes.model.get_submodule(path))
        for path, moves in choice.cut.moves.items():
            self._move(shapes.model.get_submodule(path), moves)
        self._first: dict[int, list[Node]] = {}
        for node in choice.graph.nodes:
            self._first.setdefault(node.call, []).append(node)

    def _gather(self, module: nn.Module) -> None:
        run = module.forward
        parts, recorder = self._choice.parts, self.recorder

        def forward(*args: Any, **named: Any) -> Tensor:
            output: Tensor = run(*args, **named)
            recorder.paused += 1
            whole = (
                output.new_zeros(*output.shape[:-1], output.shape[-1] * parts) + output.sum()
            )  # with its gradient
            recorder.paused -= 1
            recorder.stand_in(output, whole)
            return whole

        module.forward = forward  # type: ignore[method-assign]

    def _move(self, module: nn.Module, moves: dict[tuple[bool, int], Move]) -> None:
        run = module.forward

        def forward(*args: Any, **named: Any) -> Any:
            args, named = moved((args, named), False, moves, self._stand_in)
            return moved(run(*args, **named), True, moves, self._stand_in)

        module.forward = forward  # type: ignore[method-assign]

    def _stand_in(self, tensor: Tensor, move: Move) -> Tensor:
        """What a move makes of a tensor, without its values."""
        if move.kind == "enter":
            return tensor
        self.recorder.paused += 1
        sizes, parts = list(tensor.shape), self._choice.parts
        gathers = move.kind.startswith("gather")
        sizes[move.dim] = sizes[move.dim] * parts if gathers else sizes[move.dim] // parts
        order = sorted(range(len(sizes)), key=lambda at: -tensor.stride(at))  # operators depend on it
        other = tensor.new_zeros([sizes[at] for at in order]).permute(
            [order.index(at) for at in range(len(order))]
        )
        other = other + tensor.sum()  # with its gradient
        self.recorder.paused -= 1
        self.recorder.stand_in(tensor, other)
        return other

    def _watch(self, number: int, args: Any, named: Any) -> tuple[Any, Any]:
        """Change the written sizes of one call, and note them."""
        calls, here = self._choice.graph.calls, self.recorder.graph.calls[number]
        if number >= len(calls) or not self._first.get(number):
            return args, named
        call, nodes = calls[number], self._first[number]
        if (call.function, call.ordinal, call.frame) != (here.function, here.ordinal, here.frame):
            raise ProgramMismatch(
                nodes[0], f"the program of the parts calls {here.function} here, at {nodes[0].line}"
            )
        change = {
            place: (written, wanted)
            for place, (written, wanted) in _wanted(self._choice, call, nodes).items()
            if place < len(here.numbers) and here.numbers[place] == written != wanted
        }
        if not change:
            return args, named
        path = self._choice.graph.frames[call.frame].path if call.frame >= 0 else ""
        self._note(path, call.ordinal, Sizes(call.function, change), nodes[0])
        return changed(args, named, {place: wanted for place, (_, wanted) in change.items()})

    def _note(self, path: str, ordinal: int, sizes: Sizes, node: Node) -> None:
        known = self.sizes.setdefault(path, {})
        if known.setdefault(ordinal, sizes) != sizes:
            raise ProgramMismatch(node, f"two calls of one module need different sizes, at {node.line}")


def _wanted(choice: Choice, call: FunctionCall, nodes: list[Node]) -> dict[int, tuple[int, int]]:
    """Place among the integers of a call -> (size in the whole program, size on one rank)."""
    output = next((number for number in reversed(nodes[-1].outputs) if number is not None), None)
    if output is None:
        return {}
    whole, local = choice.graph.values[output].shape, choice.local(output)
    if call.function in FIRST_SIZES:
        return {
            place: sizes
            for place, sizes in enumerate(zip(whole, local, strict=True))
            if place < len(call.numbers)
        }
    if call.function == "unflatten":
        first = call.numbers[0] % (len(whole) - len(call.numbers) + 2)
        dims = range(first, first + len(call.numbers) - 1)
        return {place + 1: (whole[dim], local[dim]) for place, dim in enumerate(dims)}
    last = nodes[-1]
    if last.name in ("aten.split", "aten.split_with_sizes") and call.function in (
        "split",
        "split_with_sizes",
    ):
        dim = last.args[2] if len(last.args) > 2 else last.named.get("dim", 0)
        outputs = [number for number in last.outputs if number is not None]
        sizes = [(choice.graph.values[n].shape[dim], choice.local(n)[dim]) for n in outputs]
        listed = len(call.numbers) >= len(sizes) > 1 and last.name == "aten.split_with_sizes"
        return dict(enumerate(sizes if listed else sizes[:1]))
    if call.function in ("__getitem__", "narrow"):
        return _bounds(choice, call, nodes)
    return {}


def _bounds(choice: Choice, call: FunctionCall, nodes: list[Node]) -> dict[int, tuple[int, int]]:
    """The bounds of slices along cut dims."""
    found: dict[int, tuple[int, int]] = {}
    for node in nodes:
        if node.name != "aten.slice":
            continue
        bounds = _slice(choice, node)
        if bounds is None:
            continue
        whole, local = bounds
        for place, number in enumerate(call.numbers):
            if number == whole[1] - whole[0] and call.function == "narrow" and place == 2:
                found[place] = (number, local[1] - local[0])
            elif number in whole and not (call.function == "narrow" and place in (0, 2)):
                found[place] = (number, local[whole.index(number)])
    return found


def _slice(choice: Choice, node: Node) -> tuple[list[int], list[int]] | None:
    """(whole, local) bounds of a slice along a dim that is cut; None: of another one."""
    _, dim, start, stop, _ = slice_of(node)
    dims = choice.rules.of(node.args[0])
    at = (dim or 0) % len(dims)
    whole, local = choice.graph.values[node.args[0].value].shape[at], choice.local(node.args[0].value)[at]
    if whole == local:
        return None
    first, last, _ = slice(start, stop).indices(whole)
    before = 0
    mine = 0
    found: dict[int, int] = {0: 0}
    for segment in dims[at]:
        before, mine = (
            before + _size((segment,), choice, whole=True),
            mine + _size((segment,), choice, whole=False),
        )
        found[before] = mine
    return [first, last], [found.get(first, -1), found.get(last, -1)]


def _size(dim: Any, choice: Choice, *, whole: bool) -> int:
    return sum(
        math.prod(
            factor.size if whole or factor.index.root() not in choice.chosen else factor.size // choice.parts
            for factor in segment
        )
        for segment in dim
    )


class _Comparison:
    """Two programs, operator by operator. Copies (clone) are left out: they depend on strides."""

    def __init__(self, choice: Choice, local: Graph, positions: ScatteredPositions | None) -> None:
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
                    at, f"the program of the parts is {'longer' if node is None else 'shorter'}, at {at.line}"
                )
            self._pair(node, other, copies)
        for frame, here in zip(self._whole.frames, self._local.frames, strict=False):
            self._moves(frame, here, copies)

    def _moves(self, frame: Frame, other: Frame, copies: dict[int, int]) -> None:
        """Whether each move of a call of a module got the value that it is for."""
        for out, place in self._choice.cut.moves.get(frame.path, {}):
            mine, theirs = (each.outputs if out else each.inputs for each in (frame, other))
            found = self._of.get(self._source(theirs[place], copies))
            if found is None or self._same.get(found, found) != self._same.get(mine[place], mine[place]):
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
            raise ProgramMismatch(
                node, f"the program of the parts does {other.name} in place of {node.name}, at {node.line}"
            )
        mine = [ref.value for ref in refs((node.args, node.named))]
        theirs = [ref.value for ref in refs((other.args, other.named))]
        if len(mine) != len(theirs):
            raise ProgramMismatch(
                node, f"{node.name} takes other values in the program of the parts, at {node.line}"
            )
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
                raise ProgramMismatch(
                    node, f"{node.name} takes another constant in the program of the parts, at {node.line}"
                )
            self._of.setdefault(there, known)
        found = self._of.get(there)
        if found is None or self._same.get(found, found) != known:
            raise ProgramMismatch(
                node, f"{node.name} takes other values in the program of the parts, at {node.line}"
            )
        wanted = self._choice.local(number)
        if self._positions is not None:
            wanted = self._positions.taken(node, number, wanted)
        if shape != wanted and known not in self._gathered:
            raise ProgramMismatch(
                node,
                f"its part is {list(shape)} where {list(wanted)} is expected, before {node.name}, at "
                f"{node.line}",
            )

    def _arguments(self, node: Node, other: Node) -> None:
        if node.name == "aten.slice":
            here, wanted = self._bounds(node, other)
            if here != wanted:
                raise ProgramMismatch(
                    node, f"its part takes elements {here} where {wanted} are expected, at {node.line}"
                )
        elif _plain(node) != _plain(other):
            raise ProgramMismatch(
                node, f"{node.name} has other arguments in the program of the parts, at {node.line}"
            )

    def _bounds(self, node: Node, other: Node) -> tuple[list[int], list[int]]:
        """The elements that a slice takes, and those that it must take."""
        bounds = _slice(self._choice, node)
        _, dim, start, stop, step = slice_of(other)
        size = self._local.values[other.args[0].value].shape[dim or 0]
        here = list(slice(start, stop, step).indices(size)[:2])
        _, _, first, last, _ = slice_of(node)
        return here, list(slice(first, last).indices(size)[:2]) if bounds is None else bounds[1]


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
        return repr(_without(node.args)) + repr(_without(node.named))
    filled = {"aten.full": 1, "aten.new_full": 2}.get(node.name)
    fill = (
        node.args[filled] if filled is not None and len(node.args) > filled else node.named.get("fill_value")
    )
    return repr(fill) + repr({key: node.named[key] for key in ("dtype", "generator") if key in node.named})


def _without(thing: Any) -> Any:
    if isinstance(thing, Ref):
        return None
    if isinstance(thing, (list, tuple)):
        return [_without(part) for part in thing]
    if isinstance(thing, dict):
        return {key: _without(part) for key, part in thing.items()}
    return thing


def narrow_(shapes: Shapes, cut: Cut) -> None:
    """Give a copy without values one rank's part of each parameter and buffer that is cut. Ties stay."""
    made: dict[int, Tensor] = {}
    model = shapes.model
    for name, dim in cut.dims.items():
        path, _, leaf = name.rpartition(".")
        value = getattr(model.get_submodule(path), leaf)
        sizes = list(value.shape)
        sizes[dim] //= cut.parts
        with shapes.mode, torch.no_grad():
            part = torch.empty(sizes, dtype=value.dtype, device=value.device)
        made[id(value)] = (
            nn.Parameter(part, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else part
        )
    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for leaf, value in list(table.items()):
                if value is not None and id(value) in made:
                    table[leaf] = made[id(value)]


def moved(
    thing: Any, out: bool, moves: Mapping[tuple[bool, int], Move], change: Callable[[Tensor, Move], Tensor]
) -> Any:
    """What a module takes or returns, with its moves made. A tensor in several places is moved once."""
    if not any(there == out for there, _ in moves):
        return thing
    place, made = -1, dict[int, Tensor]()

    def walk(tensor: Tensor) -> Tensor:
        nonlocal place
        place += 1
        move = moves.get((out, place))
        if move is None:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor, move)
        return made[id(tensor)]

    return mapped(thing, walk)


def changed(args: Any, named: Any, numbers: dict[int, int]) -> tuple[Any, Any]:
    """Arguments of a call with other integers at these places; places are those of `numbers_of`."""
    place = -1

    def walk(thing: Any) -> Any:
        nonlocal place
        if isinstance(thing, int) and not isinstance(thing, bool):
            place += 1
            return numbers.get(place, thing)
        if isinstance(thing, dict):
            return {key: walk(part) for key, part in thing.items()}
        if isinstance(thing, slice):
            return slice(walk(thing.start), walk(thing.stop), walk(thing.step))
        if isinstance(thing, tuple) and not isinstance(thing, torch.Size):
            return tuple(walk(part) for part in thing)
        if isinstance(thing, (list, torch.Size)):
            return [walk(part) for part in thing]
        return thing

    return walk(args), walk(named)
