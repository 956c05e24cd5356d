"""Whether a stage's gradients of weights can be computed after those of its inputs, weight by weight.

PyTorch's two passes of backward stop at the nodes where a weight joins what the inputs reach:

    input -- mul ------ add -- output          each weight joins at one node: two passes
               |         |
           weight   other weight

A part of the graph that has weights only has to join at one node. Where it joins at several, the second pass
would go through it several times; where it is an output by itself, never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["weights_join_once"]


def weights_join_once(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Look through the graph of a forward. Cost: one visit of each node.

    Args:
        outputs: that require gradients.
        inputs: leaves that do.
    """
    leaves = {_node(tensor) for tensor in inputs}
    roots = [_node(tensor) for tensor in outputs]
    reaches: dict[Any, bool] = {}  # the inputs
    for node in _children_first(roots):
        reaches[node] = node in leaves or any(reaches[child] for child in _children(node))
    if not all(reaches[root] for root in roots):
        return False
    joins = [child for node in reaches for child in {*_children(node)} if not reaches[child]]
    return len(joins) == len(set(joins))


def _node(tensor: Tensor) -> Any:
    """Of a tensor in the graph: of a leaf, what adds up its gradient."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    view: Any = tensor.view_as(tensor)
    return view.grad_fn.next_functions[0][0]


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Sequence[Any]) -> list[Any]:
    """Every node once, after those that it leads to."""
    found: dict[Any, None] = {}
    waiting = [(root, False) for root in roots]
    while waiting:
        node, left = waiting.pop()
        if left:
            found[node] = None
        elif node not in found:
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node) if child not in found]
    return list(found)
