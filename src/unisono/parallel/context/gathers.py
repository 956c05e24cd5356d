"""Operators that look at other positions, or at all of them: each rank runs them on the whole sequence.

The positions are gathered, the operator runs as in one process, and a rank keeps its own positions of what it
returns. So the sequence is whole on each rank during this operator, and cut again after it.

| operator | positions of the output |
|---|---|
| convolution, stride 1 | those of its input, or with a shift: padding in front makes earlier ones |
| convolution, other strides, or transposed | a new sequence: frames of samples |
| convolution, the sequence in place of its channels | none: the output is whole |
| layer of nn.LSTM, group norm | those of its input |
| unbind | none: a program that takes the positions one by one gets all of them |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .call import RuleCall
from .exchange import gathered, take
from .layout import LayoutError, PositionSpan, SequenceDim

__all__ = ["all_positions", "convolution", "unbound"]

Places = list[SequenceDim | None]


def convolution(call: RuleCall) -> Places:
    """The dims of its input are rows, channels, and those in which it slides."""
    place = call.cut(call.args[0])
    if place.dim == 0:
        call.stays_whole(*call.args[1:])
        return [place]
    return _on_all(call, [None if place.dim == 1 else _slid(call, place)])


def all_positions(call: RuleCall) -> Places:
    """The first output has the positions of the input; others, such as last states, are whole."""
    place, came = call.cut(call.args[0]), call.shape(call.args[0])
    same = len(call.out()) == len(came) and call.out()[place.dim] == came[place.dim]
    return _on_all(call, [place if same else None, *(None for _ in call.node.outputs[1:])])


def unbound(call: RuleCall) -> Places:
    """All positions, one by one."""
    return _on_all(call, [None for _ in call.node.outputs])


def _on_all(call: RuleCall, found: Places) -> Places:
    """Run the operator on all positions of its first input. found: what is kept of its outputs."""
    came = call.args[0]
    place, shape, op = call.cut(came), call.shape(came), call.node.op
    call.stays_whole(*call.args[1:])
    if call.written_later(came):
        raise LayoutError("it takes a copy of memory that is written later, or through it")
    ranks, label = call.ranks, call.label()

    def kept(value: Tensor, at: SequenceDim | None) -> Tensor:
        return value if at is None else take(value, at, ranks.rank)

    def run(value: Tensor, *args: Any, **named: Any) -> Any:
        made = op(gathered(value, shape, place, ranks, label), *args, **named)
        if isinstance(made, Tensor):
            return kept(made, found[0])
        return tuple(kept(one, at) for one, at in zip(made, found, strict=True))

    call.run = run
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
