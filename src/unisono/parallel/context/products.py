"""Matrix products where the sequence is cut: rows by themselves, sums over positions, written-out attention.

| of first @ second, the sequence is | what runs |
|---|---|
| the rows of the first, the columns of the second, or a batch | the product of this rank's part |
| what the product sums over | the product of this rank's part, and a sum over the ranks |
| the rows of the first, and in the second, too | all positions of the second are gathered |
| the columns of the second, and in the first, too | all positions of the first are gathered |

In written-out attention q @ k.T gathers the keys, and weights @ v the values; a rank keeps the scores of its
own queries. Source: Dubey et al., The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.parallel.graph.program import Ref

from .call import RuleCall
from .exchange import gathered, total
from .layout import LayoutError, SequenceDim

__all__ = ["product"]


def product(call: RuleCall) -> list[SequenceDim | None]:
    """mm, bmm, and both with a term that is added."""
    one, other = call.args[-2:]
    dims = len(call.out())
    rows, columns = dims - 2, dims - 1
    first, second = call.place(one), call.place(other)
    either = first or second
    if either is None:  # only the term is cut
        raise LayoutError("it adds a value that is cut to one that is not")
    if any(place is not None and place.dim < rows for place in (first, second)):
        return _in_batches(call, either)
    if first is not None and first.dim == rows:
        return _placed(call, first, None if second is None else -1)
    if second is not None and second.dim == columns:
        return _placed(call, second, None if first is None else -2)
    return _summed(call, either.at(columns))


def _in_batches(call: RuleCall, place: SequenceDim) -> list[SequenceDim | None]:
    for ref in call.args[-2:]:
        call.want(ref, place)
    return _placed(call, place, None)


def _placed(call: RuleCall, place: SequenceDim, gathers: int | None) -> list[SequenceDim | None]:
    """The output is cut at `place`. gathers: the argument of which all positions are needed."""
    if len(call.args) > 2:
        _term(call, call.args[0], place)
    if gathers is not None:
        ref, op, ranks = call.args[gathers], call.node.op, call.ranks
        shape, lies, label = call.shape(ref), call.cut(ref), call.label()

        def run(*args: Any, **named: Any) -> Any:
            given = [*args]
            given[gathers] = gathered(given[gathers], shape, lies, ranks, label)
            return op(*given, **named)

        call.run = run
    return [place]


def _summed(call: RuleCall, place: SequenceDim) -> list[SequenceDim | None]:
    """Each rank sums over its positions. place: in the columns of the first."""
    one, other = call.args[-2:]
    call.want(one, place)
    call.want(other, place.at(place.dim - 1))
    if len(call.args) > 2:
        call.stays_whole(call.args[0])
    ranks, label = call.ranks, call.label()

    def run(*args: Any, beta: float = 1, alpha: float = 1) -> Tensor:
        made = total(torch.matmul(*args[-2:]), ranks, label)
        return made if len(args) == 2 else beta * args[0] + alpha * made

    call.run = run
    return [None]


def _term(call: RuleCall, ref: Ref, place: SequenceDim) -> None:
    shape = call.shape(ref)
    dim = place.dim - len(call.out()) + len(shape)
    if dim >= 0 and shape[dim] == call.out()[place.dim]:
        call.want(ref, place.at(dim))
    else:
        call.stays_whole(ref)
