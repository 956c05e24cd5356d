"""Operators that look at other positions, or at all of them, and matrix products, which may sum over them.

Where all positions are needed, they are gathered, the operator runs on the whole sequence as in one process,
and a rank keeps its own positions of what it returns, or all of them:

| operator | positions that a rank keeps |
|---|---|
| convolution, stride 1 | those of its input, or with a shift: padding in front makes earlier ones |
| convolution, other strides, or transposed | its own of a new sequence: frames of samples |
| layer of nn.LSTM, group norm, softmax, cumsum, sort | those of its input |
| any other that cannot run on a part of the sequence | all |

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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.program import Ref, refs, replayed, writes_of

from .call import RuleCall
from .exchange import gathered, take, total
from .layout import LayoutError, PositionSpan, SequenceDim

__all__ = ["all_positions", "convolution", "on_all", "product"]

Places = list[SequenceDim | None]


def convolution(call: RuleCall) -> Places:
    """The dims of its input are rows, channels, and those in which it slides."""
    place = call.cut(call.args[0])
    if place.dim == 0:
        call.stays_whole(*call.args[1:])
        return [place]
    return on_all(call, [None if place.dim == 1 else _slid(call, place)])


def all_positions(call: RuleCall) -> Places:
    """The first output has the positions of the input; others, such as last states, are whole."""
    place, came = call.cut(call.args[0]), call.shape(call.args[0])
    same = len(call.out()) == len(came) and call.out()[place.dim] == came[place.dim]
    return on_all(call, [place if same else None, *(None for _ in call.node.outputs[1:])])


def on_all(call: RuleCall, found: Places) -> Places:
    """Run the operator on all positions of its inputs. found: what is kept of its outputs.

    Raises:
        LayoutError: it writes into a part of the sequence, or another operator into what it would copy.
    """
    if any(before in call.places for before, _ in writes_of(call.node)):
        raise LayoutError("it writes into positions of the sequence, and needs other ones")
    given = [*refs((call.args, call.node.named))]
    if any(call.place(ref) is not None and call.written_later(ref) for ref in given):
        raise LayoutError("it takes a copy of memory that is written later, or through it")
    lies = [None if call.whole else call.place(ref) for ref in given]
    shapes = [call.shape(ref) for ref in given]
    op, ranks, label = replayed(call.node, call.graph, call.written), call.ranks, call.label()

    def kept(value: Tensor, at: SequenceDim | None) -> Tensor:
        return value if at is None else take(value, at, ranks.rank)

    def run(*args: Any, **named: Any) -> Any:
        known = iter(zip(lies, shapes, strict=True))

        def complete(value: Tensor) -> Tensor:
            place, shape = next(known)
            return value if place is None else gathered(value, shape, place, ranks, label)

        args, named = mapped((args, named), complete, Tensor)
        made = op(*args, **named)
        if isinstance(made, Tensor):
            return kept(made, found[0])
        return tuple(one if one is None else kept(one, at) for one, at in zip(made, found, strict=True))

    call.run, call.on_all = run, True
    return found


def _slid(call: RuleCall, place: SequenceDim) -> SequenceDim | None:
    """Where the positions are after a kernel has slid over them; None: there are too few to be cut."""
    _, weight, _, stride, padding, dilation, transposed, *_ = call.args
    at, came, goes = place.dim - 2, call.shape(call.args[0])[place.dim], call.out()[place.dim]
    if place.outer != 1 or place.span.size != came:
        raise LayoutError("it slides over a dimension that is the sequence and another one")
    if goes == came:
        return place
    if not transposed and _of(stride, at) == 1:
        last = _of(dilation, at) * (call.shape(weight)[place.dim] - 1) - _of(padding, at)
        return SequenceDim(place.dim, 1, place.span.part(last, last + goes))
    ranks = call.ranks.ranks
    return SequenceDim(place.dim, 1, PositionSpan(goes, 0, goes, ranks)) if goes >= 2 * ranks else None


def _of(given: Sequence[int], at: int) -> int:
    """The entry of a dim; one entry is that of all."""
    return given[at] if len(given) > 1 else given[0]


# ---- matrix products ----


def product(call: RuleCall) -> Places:
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


def _in_batches(call: RuleCall, place: SequenceDim) -> Places:
    for ref in call.args[-2:]:
        call.want(ref, place)
    return _placed(call, place, None)


def _placed(call: RuleCall, place: SequenceDim, gathers: int | None) -> Places:
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


def _summed(call: RuleCall, place: SequenceDim) -> Places:
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
