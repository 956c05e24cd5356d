"""The call of an operator, as a rule sees it: its arguments, where the sequence lies in them, its refusal."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unisono.errors import UnfitError
from unisono.parallel.costs.collectives import Link
from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.program import Graph, Node, Ref, writes_of
from unisono.parallel.tensor_moves import TensorAxis, move

from .layout import LayoutError, SequenceDim, gathered

Run = Callable[..., Any]


@dataclass
class RuleCall:
    """One operator, on one rank.

    Args:
        places: of the values that are cut.
        written: memory that some operator writes in place.
        link: the prices of the context group's network.
        whole: the values at these places are whole: the cut begins here.
    Attributes:
        wants: values -> the place that this operator needs; a whole value is taken in part.
        run: what runs in place of the operator, on the arguments that are there.
        on_all: it runs on all positions.
    """

    graph: Graph
    node: Node
    places: dict[int, SequenceDim]
    ranks: TensorAxis
    link: Link
    written: set[int]
    whole: bool = False
    wants: dict[int, SequenceDim] = field(default_factory=dict)
    run: Run | None = None
    on_all: bool = False

    @property
    def args(self) -> tuple[Any, ...]:
        """As they were recorded, with a Ref in place of each tensor."""
        return self.node.args

    def label(self, what: str = "positions") -> str:
        """Of what it exchanges, in a trace."""
        return label_of(what, self.graph, self.node)

    def total(self) -> Callable[[Tensor], Tensor]:
        """What sums a value over the ranks."""
        ranks, label = self.ranks, self.label()
        return lambda value: move(value, "total", 0, ranks, label)

    def given(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        return self.args[at] if len(self.args) > at else self.node.named.get(name, default)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The whole shape of an input."""
        return self.graph.values[ref.value].shape

    def out(self, at: int = 0) -> tuple[int, ...]:
        """The whole shape of an output."""
        number = self.node.outputs[at]
        assert number is not None
        return self.graph.values[number].shape

    def place(self, ref: Any) -> SequenceDim | None:
        """Where the sequence lies in an input; None: it is whole, or no tensor."""
        return self.places.get(ref.value) if isinstance(ref, Ref) else None

    def cut(self, ref: Ref) -> SequenceDim:
        """Likewise, of one that has to be cut."""
        found = self.place(ref)
        if found is None:
            raise LayoutError("it takes a value that is cut beside one that has to be, and is not")
        return found

    def written_later(self, ref: Ref) -> bool:
        """Whether a later operator writes into the memory of an input."""
        values = self.graph.values
        memory = values[ref.value].storage
        return memory in self.written and any(
            values[before].storage == memory
            for node in self.graph.nodes[self.node.number + 1 :]
            for before, _ in writes_of(node)
        )

    def complete(self, given: Sequence[Ref]) -> Callable[[Any], Any]:
        """What gathers all positions of these inputs, in nested arguments that have them in this order."""
        lies = [(self.shape(ref), self.place(ref)) for ref in given]
        ranks, label = self.ranks, self.label()

        def completed(arguments: Any) -> Any:
            known = iter(lies)

            def whole(value: Tensor) -> Tensor:
                shape, place = next(known)
                return value if place is None else gathered(value, shape, place, ranks, label)

            return mapped(arguments, whole)

        return completed

    def stays_whole(self, *given: Any) -> None:
        """Refuse inputs that are cut."""
        if any(self.place(ref) is not None for ref in given):
            raise LayoutError("it takes a value that is cut along the sequence where it needs all of it")

    def want(self, ref: Ref, place: SequenceDim) -> None:
        """Have an input at a place."""
        size, unit = self.shape(ref)[place.dim], place.outer * place.span.size
        if size % unit:
            raise LayoutError(f"a dimension of {size} meets a sequence of {place.span.size} positions")
        if self.place(ref) != place:
            self.wants[ref.value] = place


def label_of(what: str, graph: Graph, node: Node) -> str:
    """The label of what an operator exchanges, in a trace."""
    return f"up::{what}|{graph.module_of(node) or graph.model}"


# ---- what a user is told of an operator ----


LISTED = 3  # operators in a warning
OF_ATTENTION = ("aten.mm", "aten.bmm", "aten.baddbmm", "aten._softmax", "aten._safe_softmax")
WRITTEN_OUT = (
    "Write attention by torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
    'attn_implementation="sdpa"), or leave out context='
)
ELSE = "What is no attention has to work position by position: change that line, or leave out context="


class ContextError(UnfitError):
    """A program that cannot be cut along the sequence; the text names the operator and the line."""


def refusal(graph: Graph, node: Node, why: str, ranks: int) -> ContextError:
    """The error of an operator."""
    return ContextError(
        f"context={ranks} cannot cut {_named(graph, node)} along the sequence: {why}, at {node.line}. "
        f"{WRITTEN_OUT if node.name in OF_ATTENTION else ELSE}"
    )


def warn_of(graph: Graph, nodes: Sequence[Node], ranks: int) -> None:
    """Say which operators take as much memory and time on each rank as in one process."""
    lines = dict.fromkeys(f"{_named(graph, node)}, at {node.line}" for node in nodes)
    if not lines:
        return
    text = "\n  ".join(itertools.islice(lines, LISTED))
    more = f"\n  and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    warnings.warn(
        f"context={ranks}: operators of {graph.model} need other positions than a rank's own. Each rank runs "
        f"them on the whole sequence:\n  {text}{more}",
        stacklevel=2,
    )


def _named(graph: Graph, node: Node) -> str:
    module = graph.module_of(node)
    return f'{node.name} in "{module}"' if module else str(node.name)
