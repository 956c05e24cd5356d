"""What autograd saved for a backward within a recorded program: one by `torch.autograd.grad`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .program import Graph


def saved_result(graph: Graph, tensor: Tensor, number: int, made_by: Mapping[int, Any]) -> int:
    """Return the value that `tensor` (value `number`) is: the result of an operator where autograd saved it.

    Autograd keeps a result detached, and gives what it takes out the grad_fn of the result. No operator
    shows that. A program that is run again by its operators would lose the gradient through the result.
    A detached tensor that is written has another grad_fn, and is itself.

    Args:
        made_by: value -> the grad_fn that it was last seen with.

    Example: tanh makes 3, detach of 3 makes 4, and tanh_backward takes 4 with tanh's grad_fn -> 3.
    """
    found = number
    while tensor.grad_fn is not None and (node := graph.values[found].node) >= 0:
        if graph.nodes[node].op is not torch.ops.aten.detach.default:
            break
        found = int(graph.nodes[node].args[0].value)
        if made_by.get(found) is tensor.grad_fn:
            return found
    return number
