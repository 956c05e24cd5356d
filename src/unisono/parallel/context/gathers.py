"""Operators that look at other positions, or at all of them: each rank runs them on the whole sequence.

The positions are gathered, the operator runs as in one process, and a rank keeps its own positions of what it
returns, or all of them:

| operator | positions that a rank keeps |
|---|---|
| convolution, stride 1 | those of its input, or with a shift: padding in front makes earlier ones |
| convolution, other strides, or transposed | its own of a new sequence: frames of samples |
| layer of nn.LSTM, group norm, softmax, cumsum, sort | those of its input |
| any other that cannot run on a part of the sequence | all |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.program import refs, replayed, writes_of

from .call import RuleCall
from .exchange import gathered, take
from .layout import LayoutError, PositionSpan, SequenceDim

__all__ = ["all_positions", "convolution", "on_all"]

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
