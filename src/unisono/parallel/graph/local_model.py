"""The model on one rank, on shapes: its own code, with each rank's part of the parameters.

A size that the program has written down, such as the number of heads in a view, is noted and changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from unisono.torch_internals.training import module_at

from .capture import Recorder
from .choice import SplitChoice
from .containers import RecordedCalls, argument_names, given_by, returned_by, with_changed
from .cut import Cut, ModuleMove, Moves, Sizes
from .fused import like
from .indices import size_of
from .program import FunctionCall, Node
from .rules import GROUP_NORM, slice_of
from .shapes import Shapes

FIRST_SIZES = {"view", "reshape", "expand", "zeros", "ones", "empty", "rand", "randn", "full", "broadcast_to"}
FIRST_SIZES |= {"new_zeros", "new_ones", "new_empty", "new_full"}


class ProgramMismatch(Exception):
    """The cut program is another one. Args: the operator of the whole program where they differ, why."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, f"{why}, at {node.line}"


class LocalModel:
    """The model's copy on one rank.

    Attributes:
        sizes: by module, the number of the call in its forward, what is to be changed.
        calls: by module, how it is called, of those that do not run as they are, and those around them.
    """

    def __init__(self, choice: SplitChoice, shapes: Shapes) -> None:
        self._choice, self._shapes = choice, shapes
        self.sizes: dict[str, dict[int, Sizes]] = {}
        self.recorder = Recorder(shapes, self._watch)
        narrow_(shapes, choice.cut)
        for path, kind in choice.cut.modules.items():
            if kind == "column, gathered":
                self._gather(module_at(shapes.model, path))
        self.calls: dict[str, RecordedCalls] = {}
        for path in choice.cut.checked(shapes.model):
            moves = choice.cut.moves.get(path, {})
            self._move(module_at(shapes.model, path), moves, self.calls.setdefault(path, RecordedCalls()))
        self._first: dict[int, list[Node]] = {}
        for node in choice.graph.nodes:
            self._first.setdefault(node.call, []).append(node)

    def _gather(self, module: nn.Module) -> None:
        run = module.forward

        @wraps(run)
        def forward(*args: Any, **named: Any) -> Tensor:
            return self._stand_in(run(*args, **named), ModuleMove("gather", -1))

        module.forward = forward  # type: ignore[method-assign]

    def _move(self, module: nn.Module, moves: Moves, calls: RecordedCalls) -> None:
        run, names, count = module.forward, argument_names(module.forward), 0
        made = ModuleMoves(moves, names, self._stand_in)

        @wraps(run)
        def forward(*args: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            calls.counts = {count}
            with self.recorder.paused:
                calls.takes.add(given_by(args, named, names, [slot for slot, _ in made.into]))
            args, named = made.taken(args, named)
            output = run(*args, **named)
            with self.recorder.paused:
                calls.returns.add(returned_by(output, [slot for slot, _ in made.out]))
            return made.returned(output)

        module.forward = forward  # type: ignore[method-assign]

    def _stand_in(self, tensor: Tensor, move: ModuleMove) -> Tensor:
        """What a move makes of a tensor, without its values."""
        if move.kind == "enter":
            return tensor
        with self.recorder.paused:
            sizes, parts = list(tensor.shape), self._choice.parts
            gathers = move.kind.startswith("gather")
            sizes[move.dim] = sizes[move.dim] * parts if gathers else sizes[move.dim] // parts
            # operators depend on the strides
            order = sorted(range(len(sizes)), key=tensor.stride().__getitem__, reverse=True)
            other = tensor.new_zeros([sizes[at] for at in order])
            other = other.permute([order.index(at) for at in range(len(order))])
            other = other + tensor.sum()  # with its gradient
        self.recorder.stand_in(tensor, other)
        return other

    def _watch(self, number: int, args: Any, named: Any) -> tuple[Any, Any]:
        """Change the written sizes of one call, and note them."""
        calls, here = self._choice.graph.calls, self.recorder.graph.calls[number]
        if number >= len(calls) or not self._first.get(number):
            return args, named
        call, nodes = calls[number], self._first[number]
        if (call.function, call.ordinal, call.frame) != (here.function, here.ordinal, here.frame):
            raise ProgramMismatch(nodes[0], f"the program of the parts calls {here.function} here")
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
            raise ProgramMismatch(node, "two calls of one module need different sizes")


def _wanted(choice: SplitChoice, call: FunctionCall, nodes: list[Node]) -> dict[int, tuple[int, int]]:
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
    splits = ("split", "split_with_sizes")
    if last.name.removeprefix("aten.") in splits and call.function in splits:
        dim = last.args[2] if len(last.args) > 2 else last.named.get("dim", 0)
        outputs = [number for number in last.outputs if number is not None]
        sizes = [(choice.graph.values[n].shape[dim], choice.local(n)[dim]) for n in outputs]
        listed = len(call.numbers) >= len(sizes) > 1 and last.name == "aten.split_with_sizes"
        return dict(enumerate(sizes if listed else sizes[:1]))
    if call.function == "group_norm":
        norms = [node for node in nodes if node.name == GROUP_NORM]
        return dict(enumerate((node.args[6], groups_of_part(choice, node)) for node in norms))
    if call.function in ("__getitem__", "narrow"):
        return _bounds(choice, call, nodes)
    return {}


def groups_of_part(choice: SplitChoice, node: Node) -> int:
    """How many groups a rank's channels are, of a group norm: each has as many channels as without a cut."""
    number = node.args[0].value
    groups: int = node.args[6] * choice.local(number)[1] // choice.graph.values[number].shape[1]
    return groups


def _bounds(choice: SplitChoice, call: FunctionCall, nodes: list[Node]) -> dict[int, tuple[int, int]]:
    """The bounds of slices along cut dims."""
    found: dict[int, tuple[int, int]] = {}
    for node in nodes:
        if node.name != "aten.slice":
            continue
        bounds = slice_bounds(choice, node)
        if bounds is None:
            continue
        whole, local = bounds
        for place, number in enumerate(call.numbers):
            if number == whole[1] - whole[0] and call.function == "narrow" and place == 2:
                found[place] = (number, local[1] - local[0])
            elif number in whole and not (call.function == "narrow" and place in (0, 2)):
                found[place] = (number, local[whole.index(number)])
    return found


def slice_bounds(choice: SplitChoice, node: Node) -> tuple[list[int], list[int]] | None:
    """(whole, local) bounds of a slice along a dim that is cut; None: of another one."""
    _, dim, start, stop, _ = slice_of(node)
    dims = choice.rules.of(node.args[0])
    at = (dim or 0) % len(dims)
    whole, local = choice.graph.values[node.args[0].value].shape[at], choice.local(node.args[0].value)[at]
    if whole == local:
        return None
    first, last, _ = slice(start, stop).indices(whole)
    before, mine, found = 0, 0, {0: 0}
    for segment in dims[at]:
        before, mine = before + size_of((segment,)), mine + choice.local_size(segment)
        found[before] = mine
    return [first, last], [found.get(first, -1), found.get(last, -1)]


def narrow_(shapes: Shapes, cut: Cut) -> None:
    """Give a copy without values one rank's part of each parameter and buffer that is cut."""

    def part(value: Tensor, dim: int) -> Tensor:
        sizes = list(value.shape)
        sizes[dim] //= cut.parts
        return torch.empty(sizes, dtype=value.dtype, device=value.device)

    with shapes.mode, torch.no_grad():
        keep_parts(shapes.model, cut, part, buffers=True)


def keep_parts(
    model: nn.Module, cut: Cut, part: Callable[[Tensor, int], Tensor], *, buffers: bool = False
) -> None:
    """Keep a part of each parameter that is cut, and of `buffers`. Ties stay.

    Args:
        part: of its values and its dim -> what is kept of it.
    """
    made: dict[int, tuple[Tensor, Any]] = {}  # with the old one, so that its id stays its own
    for path, dims in cut.leaves(model).items():
        module = module_at(model, path)
        for table in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for leaf, value in [(leaf, table.get(leaf)) for leaf in dims]:
                if value is not None and id(value) not in made:
                    new = part(value.data, dims[leaf])
                    made[id(value)] = value, like(value, new) if isinstance(value, nn.Parameter) else new
                if value is not None:
                    table[leaf] = made[id(value)][1]


class ModuleMoves:
    """The moves of one module."""

    def __init__(
        self, moves: Moves, names: tuple[str, ...], change: Callable[[Tensor, ModuleMove], Tensor]
    ) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._change = change
        self.into, self.out = (
            [(slot, move) for (out, slot), move in moves.items() if out == side] for side in (False, True)
        )

    def taken(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the module takes, with its moves made. A tensor at several slots is moved once."""
        if not self.into:
            return args, named
        made, given = dict[int, Tensor](), [*args]
        for (name, *rest), move in self.into:
            place = self._places.get(name, name)
            if isinstance(place, int) and place < len(given):
                given[place] = with_changed(given[place], (*rest,), self._changing(move, made))
            elif name in named:
                named = {**named, name: with_changed(named[name], (*rest,), self._changing(move, made))}
        return tuple(given), named

    def returned(self, output: Any) -> Any:
        """What it returns, likewise."""
        made = dict[int, Tensor]()
        for slot, move in self.out:
            output = with_changed(output, slot, self._changing(move, made))
        return output

    def _changing(self, move: ModuleMove, made: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
        def change(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._change(tensor, move)
            return made[id(tensor)]

        return change


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
