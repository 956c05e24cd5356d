"""The recorded program of a model, as data: values, operators, calls of modules and of functions.

    %3 = aten.addmm(bias, %1, %2)     in "layers.0.fc1", at model.py:17

An operator is PyTorch's (ATen's), after its own decompositions. A value is what an operator returned, a
parameter, a buffer, an input, or a constant that the program found elsewhere. A call of a function is one
line of the user's program, such as `x.view(b, t, 12, -1)`; operators know theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.parallel.costs.operators import flops_by_price
from unisono.torch_internals.fake import arguments_of

from .containers import PLAIN, Slot, mapped, slots_in, tensors_in

HOOKS = ("register_hook", "register_multi_grad_hook")  # functions whose effect no operator shows


class Ref(NamedTuple):
    """Stands for a value among the arguments of an operator."""

    value: int


class Use(NamedTuple):
    """One use of a parameter or buffer: the number of the operator, and the innermost module around it."""

    node: int
    module: str


@dataclass(frozen=True)
class Value:
    """One tensor.

    Args:
        kind: parameter, buffer, input, constant or operator.
        name: of a parameter or buffer, its first path in the model.
        storage: equal for values that share memory.
        node: the operator that made it; -1: none.
    """

    number: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    node: int = -1
    name: str = ""

    @property
    def differentiable(self) -> bool:
        """Whether its type may have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """One operator.

    Args:
        op: PyTorch's OpOverload.
        args, named: as it was called, with a Ref in place of each tensor.
        outputs: numbers of values; None: an output that is no tensor.
        frames: the calls of modules around it, outermost first.
        call: the function call that it belongs to, a number of Graph.calls; -1: none.
        line: file and line of the program, outside PyTorch.
        grad: gradients were enabled.
    """

    number: int
    op: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    outputs: tuple[int | None, ...]
    frames: tuple[int, ...]
    call: int
    line: str
    flops: int
    grad: bool = True

    @property
    def name(self) -> str:
        """The operator's name without its overload, such as "aten.addmm"."""
        return str(self.op.overloadpacket)

    @property
    def made(self) -> list[int]:
        """The values that it returns."""
        return [number for number in self.outputs if number is not None]

    @property
    def taken(self) -> list[int]:
        """The values that it takes."""
        return [ref.value for ref in refs((self.args, self.named))]


@dataclass
class Frame:
    """One call of a module: operators [first, last), and the tensors it took and returned.

    Attributes:
        begin, end: operators of its forward; those before and after are of hooks.
        names: of the arguments that the module takes by place.
        slots: of each input and of each output.
        hooked: a hook puts other tensors, or other places, for those that it takes or returns.
        arguments: (args, named) of the call, with a Ref in place of each tensor.
        recomputed: the module around it has called it by torch.utils.checkpoint.
        level: how many calls are around it.    inside: how many are in it, all of which follow it.
    """

    number: int
    path: str
    kind: str
    first: int
    last: int = -1
    begin: int = -1
    end: int = -1
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    names: tuple[str, ...] = ()
    slots: tuple[tuple[Slot, ...], tuple[Slot, ...]] = ((), ())
    hooked: bool = False
    arguments: Any = None
    grad: bool = True
    recomputed: bool = False
    autocast: bool = False
    level: int = 0
    inside: int = 0


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function or method of PyTorch by the program.

    Args:
        function: its name, such as "view".
        frame: the innermost call of a module; -1: outside all.
        ordinal: among the calls of functions in that frame that take sizes; -1: it is none of these.
        numbers: the integers among its arguments, in order.
    """

    function: str
    frame: int
    ordinal: int
    numbers: tuple[int, ...]


@dataclass
class Graph:
    """What a model did on one sample. Made by `capture`; prints as a table by module.

    Attributes:
        result: what the model returned, with a Ref in place of each tensor.
        own_backward: values of a torch.autograd.Function of the program -> the innermost call of a module.
        taken_by_functions: values that such a function takes.
        constants: tensors that the program found elsewhere: as they are, or (module, attribute) of the model.
        kept: values that are in an attribute of a module afterwards -> that attribute.
        rebound: buffers that are another tensor afterwards.
        recomputed: operators that a module has run by torch.utils.checkpoint.
        stand_ins: values of another shape that the program got in place of its own.
        apart: bounds of operators, [first, last), within which ranks of the tensor axis draw other numbers.
    """

    model: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)  # parameter or buffer -> its value
    result: Any = None
    own_backward: dict[int, int] = field(default_factory=dict)
    taken_by_functions: set[int] = field(default_factory=set)
    constants: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    rebound: dict[str, int] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)
    stand_ins: dict[int, int] = field(default_factory=dict)
    apart: list[tuple[int, int]] = field(default_factory=list)

    def uses(self, name: str) -> list[Use]:
        """Every use of a parameter or buffer, in order. A parameter that nothing uses has none."""
        number = self.names[name]
        return [Use(node.number, self.module_of(node)) for node in self.nodes if number in node.taken]

    @property
    def operators(self) -> list[Any]:
        """All operators with what they take, and what is returned: equal for programs that do the same."""
        result = [(slot, ref.value) for slot, ref in slots_in(self.result, Ref)]
        return [
            *((node.name, repr((node.args, node.named))) for node in self.nodes),
            ("result", repr(result)),
        ]

    def module_of(self, node: Node) -> str:
        """The path of the innermost module around an operator."""
        return self.frames[node.frames[-1]].path if node.frames else ""

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward; a product of n x k and k x m matrices has 2nkm."""
        return sum(node.flops for node in self.nodes)

    def table(self, depth: int | None = None) -> str:
        """One line per module: its calls, operators, parameters, FLOPs, and the bytes its operators make.

        Args:
            depth: of the deepest modules that are shown; None: all.
        """
        rows = [("module", "type", "calls", "operators", "parameters", "GFLOP", "MB made", "output")]
        seen: dict[str, list[Frame]] = {}
        for frame in self.frames:
            seen.setdefault(frame.path, []).append(frame)
        sizes = {name: math.prod(self.values[number].shape) for name, number in self.names.items()}
        for path in sorted(seen, key=lambda path: seen[path][0].number):
            if depth is not None and path.count(".") >= depth and path:
                continue
            frames = seen[path]
            inside = [node for frame in frames for node in self.nodes[frame.first : frame.last]]
            prefix = f"{path}." if path else ""
            held = sum(
                size
                for name, size in sizes.items()
                if name.startswith(prefix) and self.values[self.names[name]].kind == "parameter"
            )
            shapes = [list(self.values[number].shape) for number in frames[0].outputs[:2]]
            made = sum(self.values[out].nbytes for node in inside for out in node.made)
            rows.append(
                (
                    path or "(model)", frames[0].kind, str(len(frames)), str(len(inside)), f"{held:,}",
                    f"{sum(node.flops for node in inside) / 1e9:.4g}", f"{made / 1e6:.4g}",
                    ", ".join(map(str, shapes)),
                )
            )  # fmt: skip
        return columns(rows, right=range(2, 7))

    def __str__(self) -> str:
        return f"{self.model}: {len(self.nodes)} operators, {self.flops / 1e9:.4g} GFLOP\n{self.table()}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A table as text. right: columns that end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def writes_of(node: Node) -> list[tuple[int, int]]:
    """What an operator writes in place: (the value before, the value after)."""
    outputs = node.made
    found: list[tuple[int, int]] = []
    for place, argument in enumerate(arguments_of(node.op)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.named.get(argument.name)
            for ref in refs([given]):
                at = min(len(found), len(outputs) - 1)
                found.append((ref.value, outputs[at] if outputs else ref.value))
    return found


def drops(op: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether a call of an operator gives it a share of dropout."""
    given = dict(zip((argument.name for argument in arguments_of(op)), args, strict=False)) | named
    return bool(given.get("dropout_p", 0.0))


def written_in(graph: Graph) -> set[int]:
    """The memory that some operator writes in place."""
    return {graph.values[before].storage for node in graph.nodes for before, _ in writes_of(node)}


def replayed(node: Node, graph: Graph, written: Collection[int]) -> Any:
    """What runs in place of an operator on other tensors: their strides may be others than recorded."""
    views = ("aten.view", "aten._unsafe_view", "aten._reshape_alias")
    if node.name in views and isinstance(node.args[1], (list, tuple)):
        if graph.values[node.args[0].value].storage not in written:
            return lambda tensor, size, *_: tensor.reshape(size)
    elif node.name == "aten.lift_fresh":  # a tensor that is written down is new each time
        return torch.clone
    return node.op


def refs(arguments: Any) -> Iterator[Ref]:
    """Yield every Ref in nested lists, tuples and dicts."""
    return tensors_in(arguments, Ref)


Filler = Callable[[Callable[[Ref], Any]], Any]
"""Takes what finds a value, and returns the arguments."""


def template(thing: Any) -> Filler:
    """What fills nested arguments with values, as `mapped(thing, resolve, Ref)` does; containers are new.

    Example: template((Ref(3), 1))(values.get) == (values.get(Ref(3)), 1).
    """
    if isinstance(thing, Ref):
        return lambda resolve: resolve(thing)
    if isinstance(thing, PLAIN):
        return lambda _: thing
    if type(thing) is tuple and all(isinstance(part, PLAIN) for part in thing):
        return lambda _: thing
    if type(thing) in (tuple, list):
        parts = [template(part) for part in thing]
        if type(thing) is tuple:
            return lambda resolve: tuple([fill(resolve) for fill in parts])
        return lambda resolve: [fill(resolve) for fill in parts]
    if type(thing) is dict:
        named = [(key, template(part)) for key, part in thing.items()]
        return lambda resolve: {key: fill(resolve) for key, fill in named}
    return lambda resolve: mapped(thing, resolve, Ref)


# ---- cost ----


def flops_of(op: Any, args: tuple[Any, ...], output: Any) -> int:
    """Floating-point operations: of products, convolutions, attention; one an element of what is elementwise.

    A multiplication with an addition counts 2.

    Example: aten.mm of [2, 3] and [3, 4]: 48.
    """
    work = flops_by_price(op, args, output)
    if work is not None:
        return work
    return output.numel() if torch.Tag.pointwise in op.tags and isinstance(output, Tensor) else 0
