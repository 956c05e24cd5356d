"""What a user is told of a program that cannot be cut along the sequence, or only in part."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.errors import UnfitError

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Graph, Node

__all__ = ["ContextError", "refusal", "warn_of"]

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
