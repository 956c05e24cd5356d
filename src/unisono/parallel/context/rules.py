"""What each operator does where its inputs are cut along the sequence, and how this rank runs its part.

Positions are an index of the program, as features are. Where the rule of an operator (graph/rules.py) joins
them with dims of its inputs and outputs, each rank runs it on its positions. Here stand the operators that do
more: they look at other positions, sum over them, take some of them off, or are given sizes.

A rule gets the call of an operator and the places of the sequence in its inputs. It returns the places in the
outputs, says which whole inputs are taken in part, and may replace what runs. None: the rule on indices says
all. An operator that needs more than the positions of a rank raises LayoutError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unisono.parallel.graph.indices import Dim, one, roots
from unisono.parallel.graph.noted_call import EXPERT_LIST, EXPERTS
from unisono.parallel.graph.program import Ref, refs, replayed, writes_of
from unisono.parallel.graph.rules import ALONG, Rules, slice_of

from .attention import Attention, attend, heads_are_cheaper
from .call import RuleCall
from .layout import LayoutError, PositionSpan, SequenceDim, local_shape, take, viewed

ATTENTION = "unisono.attention"

Rule = Callable[[RuleCall], "list[SequenceDim | None] | None"]


class WholeMemory(LayoutError):
    """A value that every rank has gets a part of the sequence. Args: the value, and where the part lies."""

    says = "it writes a part of the sequence into a value that every rank has"

    def __init__(self, value: int, place: SequenceDim) -> None:
        super().__init__(self.says)
        self.value, self.place = value, place


def run_rule(call: RuleCall) -> list[SequenceDim | None]:
    """The places of the outputs. All inputs that are not in `call.places` are whole."""
    node = call.node
    rule = RULES.get(node.name)
    found = None if rule is None else rule(call)
    if found is None:
        found = _by_index(call)
    for before, after in () if call.on_all else writes_of(node):
        place = call.places.get(before)
        target = found[node.outputs.index(after)] if after in node.outputs else place
        if place is None and target is not None:
            raise WholeMemory(before, target)
        if place is None or before in call.wants or target != place:
            raise LayoutError(WholeMemory.says)
    return found


# ---- by position ----


def _by_index(call: RuleCall) -> list[SequenceDim | None]:
    """Follow the sequence as an index through the operator's rule of graph/rules.py."""
    given, values = list(refs((call.args, call.node.named))), call.graph.values
    fixed = {before for before, _ in writes_of(call.node)}  # the others come to it
    known = [ref for ref in given if call.place(ref) is not None]
    first = min(known, key=lambda ref: ref.value not in fixed)
    place = call.cut(first)
    came = {ref.value: [one(size) for size in call.shape(ref)] for ref in given}
    if not came[first.value][place.dim][0]:
        raise LayoutError("its sequence is one position")
    rules = Rules(call.graph, set(), set())
    rules.dims.update((number, [*dims]) for number, dims in came.items())
    rules.run(call.node)
    (index,) = roots([came[first.value][place.dim]])
    if index.why or index in roots(each.dim for each in rules.contractions):
        raise LayoutError("it needs all positions")

    def where(dims: Sequence[Dim]) -> list[int]:
        return [at for at, dim in enumerate(dims) if index in roots([dim])]

    for ref in given:
        here, lies = where(came[ref.value]), call.place(ref)
        if len(here) > 1 or (lies is not None and here != [lies.dim]):
            raise LayoutError("it compares each position with every other one")
        if here:
            call.want(ref, place.at(here[0]))
    found: list[SequenceDim | None] = []
    for number in call.node.outputs:
        dims = [] if number is None else rules.dims[number]
        there = where(dims)
        if number is None or not math.prod(values[number].shape):
            found.append(None)
        elif len(there) != 1 or len(dims[there[0]]) != 1:
            raise LayoutError("it makes a value of all positions")
        else:
            sizes = [factor.size for factor in dims[there[0]][0]]
            at = [factor.index.root() for factor in dims[there[0]][0]].index(index)
            found.append(SequenceDim(there[0], place.outer * math.prod(sizes[:at]), place.span))
    return found


def _created(call: RuleCall) -> list[SequenceDim | None] | None:
    """Memory whose positions are written one by one is whole on every rank."""
    place, number, sizes = call.cut(call.args[0]), call.node.outputs[0], call.out()
    assert number is not None
    values, dims = call.graph.values, len(sizes)
    memory = values[number].storage
    if memory not in call.written or not any(
        node.name == "aten.select"
        and (taken := values[node.args[0].value]).storage == memory
        and taken.shape == sizes
        and node.args[1] % dims == place.dim
        for node in call.graph.nodes[call.node.number + 1 :]
    ):
        return None
    op = call.node.op
    call.run = lambda like, *args, **named: op(like.new_empty(sizes), *args, **named)
    return [None]


# ---- shapes ----


def _view(call: RuleCall) -> list[SequenceDim | None]:
    came = call.args[0]
    if call.node.name == "aten.view" and not isinstance(call.args[1], (list, tuple)):
        raise LayoutError("it reads the bytes as another type")
    place = viewed(call.shape(came), call.cut(came), call.out())
    sizes = local_shape(call.out(), place, call.ranks.place)
    written = call.graph.values[came.value].storage in call.written
    call.run = lambda tensor, *_args, **_named: tensor.view(sizes) if written else tensor.reshape(sizes)
    return [place]


def _complex_view(call: RuleCall) -> list[SequenceDim | None]:
    place = call.cut(call.args[0])
    if place.dim >= len(call.out()):
        raise LayoutError("its real and imaginary parts are the sequence")
    return [place]


def _expand(call: RuleCall) -> list[SequenceDim | None]:
    (place,) = _by_index(call)
    assert place is not None
    sizes, op = local_shape(call.out(), place, call.ranks.place), call.node.op
    call.run = lambda tensor, _sizes, *args, **named: op(tensor, sizes, *args, **named)
    return [place]


def _select(call: RuleCall) -> list[SequenceDim | None] | None:
    came = call.args[0]
    place, dim = call.cut(came), int(call.given(1, "dim", 0) % len(call.shape(came)))
    if dim != place.dim:
        return None
    if call.written_later(came):
        raise LayoutError("it takes a position as a copy of memory that is written later, or through it")
    position = call.given(2, "index", 0)
    _only_sequence(call, came, place)
    position += place.span.size * (position < 0)
    owner = place.span.owner(position)
    at = place.span.positions(owner).index(position)
    total, here = call.total(), call.ranks.place == owner

    def run(tensor: Tensor, *_args: Any, **_named: Any) -> Tensor:
        mine = tensor.select(dim, at) if here else tensor.narrow(dim, 0, 0).sum(dim)
        return total(mine.to(tensor.dtype))

    call.run = run
    return [None]


def _only_sequence(call: RuleCall, ref: Ref, place: SequenceDim, does: str = "takes positions of") -> None:
    if place.outer != 1 or call.shape(ref)[place.dim] != place.span.size:
        raise LayoutError(f"it {does} a dimension that is the sequence and another one")


def _slice(call: RuleCall) -> list[SequenceDim | None] | None:
    came, dim, start, stop, step = slice_of(call.node)
    place, shape = call.cut(came), call.shape(came)
    dim = (dim or 0) % len(shape)
    if dim != place.dim:
        return None
    begin, end, stride = slice(start, stop, step or 1).indices(shape[dim])
    if (begin, end, stride) == (0, shape[dim], 1):
        call.run = lambda tensor, *_args, **_named: tensor.narrow(dim, 0, tensor.shape[dim])
        return [place]
    _only_sequence(call, came, place)
    if stride != 1 or end <= begin:
        raise LayoutError("it takes every other position, or none")
    held = place.span.positions(call.ranks.place)
    first, last = (sum(position < bound for position in held) for bound in (begin, end))
    call.run = lambda tensor, *_args, **_named: tensor.narrow(dim, first, last - first)
    return [SequenceDim(dim, 1, place.span.part(begin, end))]


def _cat(call: RuleCall) -> list[SequenceDim | None] | None:
    cut = next(found for ref in call.args[0] if (found := call.place(ref)) is not None)
    return _joined(call, cut) if int(call.given(1, "dim", 0) % len(call.out())) == cut.dim else None


def _joined(call: RuleCall, place: SequenceDim) -> list[SequenceDim | None]:
    """Whole values before and after the sequence, such as a learned first position: as padding."""
    given, dim = call.args[0], place.dim
    cut = [at for at, ref in enumerate(given) if call.place(ref) is not None]
    if len(cut) > 1:
        raise LayoutError("it joins other positions to the sequence")
    _only_sequence(call, given[cut[0]], place)
    sizes = [0 if call.shape(ref) == (0,) else call.shape(ref)[dim] for ref in given]
    bounds = [0, *itertools.accumulate(sizes)]
    front = bounds[cut[0]]
    span = place.span.part(-front, bounds[-1] - front)
    mine = span.positions(call.ranks.place)
    picks = [[at - begin for at in mine if begin <= at < end] for begin, end in itertools.pairwise(bounds)]

    def run(tensors: Sequence[Tensor], *_args: Any, **_named: Any) -> Tensor:
        parts = [
            value
            if at in cut or not sizes[at]
            else value.index_select(dim, torch.tensor(pick, dtype=torch.long, device=value.device))
            for at, (value, pick) in enumerate(zip(tensors, picks, strict=True))
        ]
        return torch.cat(parts, dim)

    call.run = run
    return [SequenceDim(dim, 1, span)]


def _padded(call: RuleCall) -> list[SequenceDim | None] | None:
    came, pads = call.args[0], list(call.args[1])
    place, dims = call.cut(came), len(call.shape(came))
    at = 2 * (dims - 1 - place.dim)
    front, back = [*pads[at : at + 2], 0, 0][:2]
    if not front and not back:
        return None
    _only_sequence(call, came, place)
    size, span = place.span.size, place.span.part(-front, place.span.size + back)
    if span.size < 1:
        raise LayoutError("it takes all positions off the sequence")
    had, made = (each.positions(call.ranks.place) for each in (place.span, span))
    pads[at] = _count(made, 0, front) - _count(had, 0, -front)  # padding, or positions off
    pads[at + 1] = _count(made, front + size, span.size) - _count(had, size + back, size)
    op = call.node.op
    call.run = lambda tensor, _pads, *args, **named: op(tensor, pads, *args, **named)
    return [SequenceDim(place.dim, 1, span)]


def _count(positions: Sequence[int], begin: int, end: int) -> int:
    return sum(begin <= position < end for position in positions)


# ---- sums ----


def _along(call: RuleCall) -> list[SequenceDim | None]:
    """Functions along dims: softmax, sort, cumsum, reductions. Along the sequence they get all of it."""
    try:
        return _by_index(call)
    except LayoutError:
        return all_positions(call)


def _sum(call: RuleCall) -> list[SequenceDim | None] | None:
    """sum and mean: over the sequence the ranks add up."""
    (came, *_), out = call.args, call.out()
    whole, place, given = call.shape(came), call.cut(came), call.given(1, "dim")
    over = [dim % len(whole) for dim in given] if given else list(range(len(whole)))
    if place.dim not in over:
        return None
    count = math.prod(whole[dim] for dim in over) if call.node.name == "aten.mean" else 1
    kind, keeps = call.graph.values[call.node.outputs[0] or 0].dtype, len(out) == len(whole)
    total = call.total()

    def run(tensor: Tensor, *_args: Any, **_named: Any) -> Tensor:
        summed = tensor.sum(over, keepdim=keeps, dtype=kind)
        return total(summed if count == 1 else summed / count)

    call.run = run
    return [None]


# ---- losses ----


def _nll(call: RuleCall) -> list[SequenceDim | None]:
    """nll_loss, of rows or of images."""
    came, targets, weight = call.args[:3]
    place, dims = call.cut(came), len(call.shape(came))
    if place.dim == 1 and dims > 1:
        raise LayoutError("the sequence is in place of the classes")
    call.want(targets, place.at(place.dim - (place.dim > 1)))
    call.stays_whole(weight)
    reduction, ignored = call.given(3, "reduction", 1), call.given(4, "ignore_index", -100)
    total = call.total()

    def run(tensor: Tensor, targets: Tensor, weight: Tensor | None, *_: Any, **_named: Any) -> Any:
        each = functional.nll_loss(tensor, targets, weight, ignore_index=ignored, reduction="none")
        counts = targets != ignored
        if weight is None:
            count = counts.sum().to(tensor.dtype)
        else:
            count = (weight[targets.masked_fill(~counts, 0)] * counts).sum()
        count = total(count.detach())
        if not reduction:
            return each, count
        summed = total(each.sum())
        return (summed / count if reduction == 1 else summed), count

    call.run = run
    return [place.at(place.dim - (place.dim > 1)) if not reduction else None, None]


def _distance(at: int) -> Rule:
    """Losses of two values that are alike: their mean or sum is over all elements."""

    def rule(call: RuleCall) -> list[SequenceDim | None] | None:
        reduction = call.given(at, "reduction", 1)
        if not reduction:
            return None
        given = list(refs(call.args))
        place, shape = next(found for ref in given if (found := call.place(ref))), call.shape(given[0])
        for ref in given:
            if call.shape(ref) != shape:
                raise LayoutError("it compares values of different shapes")
            call.want(ref, place)
        count, op, total = math.prod(shape) if reduction == 1 else 1, call.node.op, call.total()

        def run(*args: Any, **named: Any) -> Tensor:
            each = op(*args[:at], 0, *args[at + 1 :], **{k: v for k, v in named.items() if k != "reduction"})
            return total(each.sum() / count)

        call.run = run
        return [None]

    return rule


def _histogram(call: RuleCall) -> list[SequenceDim | None]:
    least, most = call.given(2, "min", 0), call.given(3, "max", 0)
    if least == most:
        raise LayoutError("its bounds are those of the values: give it min and max")
    call.cut(call.args[0])
    op, total = call.node.op, call.total()
    call.run = lambda *args, **named: total(op(*args, **named))
    return [None]


# ---- the tensor axis ----


def _tensor_move(call: RuleCall) -> list[SequenceDim | None]:
    came, kind, dim = call.args
    place = call.cut(came)
    if kind not in ("enter", "sum") and dim == place.dim:
        raise LayoutError("the tensor axis gathers the dimension of the sequence")
    return [place]


# ---- experts ----


def _experts(call: RuleCall) -> list[SequenceDim | None]:
    rows, chosen, weight, *_ = call.args
    shape, cut = call.shape(rows), call.cut(rows)
    place = viewed(shape, cut, (math.prod(shape[:-1]), shape[-1]))
    if place.dim:
        raise LayoutError("its rows are cut along their features")
    for ref in (chosen, weight):
        call.want(ref, place)
    return [cut]


def _listed(call: RuleCall) -> list[SequenceDim | None]:
    """Nothing shows what a layer does with each position: it gets all, and each rank takes its own."""
    first, *given = call.args
    place = call.place(first)
    if place is None:
        raise LayoutError("its first value is whole, and others are cut")
    complete, rank = call.complete([*refs(given[:2])]), call.ranks.place

    def run(module: Any, _first: Tensor, args: Any, named: Any, _parameters: Any) -> Tensor:
        args, named = complete((args, named))
        return take(module.forward(*args, **named), place, rank)

    call.run = run
    return [place]


# ---- attention ----


def _attention(call: RuleCall) -> list[SequenceDim | None]:
    named = call.node.named
    q, k, v, mask = (named[name] for name in ("query", "key", "value", "attn_mask"))
    shapes = [call.shape(ref) for ref in (q, k, v)]
    dims = len(shapes[0])
    place, keys, values = call.place(q), call.place(k), call.place(v)
    call.stays_whole(mask)
    if place is None:
        raise LayoutError("its keys are cut along the sequence, and its queries are not")
    if keys is None or values is None:  # a whole one comes to the other
        keys = values = keys or values
        if keys is not None:
            call.want(k, keys)
            call.want(v, keys)
    if keys != values:
        raise LayoutError("its keys and values are cut differently")
    if mask is not None and len(call.shape(mask)) > dims:
        raise LayoutError("its mask has more dimensions than its queries")
    if call.out()[:-1] != shapes[0][:-1] or {shape[: dims - 3] for shape in shapes} != {
        shapes[0][: dims - 3]
    }:
        raise LayoutError("its queries, keys and values have different rows")
    if {one.dim for one in (place, keys) if one is not None} != {dims - 2} or any(
        one.outer != 1 or one.span.size != shape[-2]
        for one, shape in ((place, shapes[0]), (keys, shapes[1]))
        if one is not None
    ):
        raise LayoutError("the sequence is not its last dimension but one")
    scale = named["scale"] if named["scale"] is not None else shapes[0][-1] ** -0.5
    kind = call.graph.values[q.value].dtype
    heads = keys is not None and heads_are_cheaper(shapes, kind.itemsize, call.ranks.parts, call.link)
    how = Attention(
        place.span,
        None if keys is None else keys.span,
        named["is_causal"],
        named["dropout_p"],
        scale,
        heads,
        call.label("attention"),
    )
    ranks = call.ranks

    def run(*, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **_: Any) -> Tensor:
        return attend(query, key, value, attn_mask, how, ranks)

    call.run = run
    return [place]


# ---- operators that look at other positions, or at all of them ----
#
# Where all positions are needed, they are gathered, the operator runs on the whole sequence as in one
# process, and a rank keeps its own positions of what it returns, or all of them:
#
# | operator | positions that a rank keeps |
# |---|---|
# | convolution, stride 1 | those of its input, or with a shift: padding in front makes earlier ones |
# | convolution, other strides, or transposed | its own of a new sequence: frames of samples |
# | layer of nn.LSTM, group norm, softmax, cumsum, sort | those of its input |
# | any other that cannot run on a part of the sequence | all |
#
# | of first @ second, the sequence is | what runs |
# |---|---|
# | the rows of the first, the columns of the second, or a batch | the product of this rank's part |
# | what the product sums over | the product of this rank's part, and a sum over the ranks |
# | the rows of the first, and in the second, too | all positions of the second are gathered |
# | the columns of the second, and in the first, too | all positions of the first are gathered |
#
# In written-out attention q @ k.T gathers the keys, and weights @ v the values; a rank keeps the scores of
# its own queries. Source: Dubey et al., The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.


def convolution(call: RuleCall) -> list[SequenceDim | None]:
    """The dims of its input are rows, channels, and those in which it slides."""
    place = call.cut(call.args[0])
    if place.dim == 0:
        call.stays_whole(*call.args[1:])
        return [place]
    return on_all(call, [None if place.dim == 1 else _slid(call, place)])


def all_positions(call: RuleCall) -> list[SequenceDim | None]:
    """The first output has the positions of the input; others, such as last states, are whole."""
    place, came = call.cut(call.args[0]), call.shape(call.args[0])
    same = len(call.out()) == len(came) and call.out()[place.dim] == came[place.dim]
    return on_all(call, [place if same else None, *(None for _ in call.node.outputs[1:])])


def on_all(call: RuleCall, found: list[SequenceDim | None]) -> list[SequenceDim | None]:
    """Run the operator on all positions of its inputs. found: what is kept of its outputs.

    Raises:
        LayoutError: it writes into a part of the sequence, or another operator into what it would copy.
    """
    if any(before in call.places for before, _ in writes_of(call.node)):
        raise LayoutError("it writes into positions of the sequence, and needs other ones")
    given = [*refs((call.args, call.node.named))]
    if any(call.place(ref) is not None and call.written_later(ref) for ref in given):
        raise LayoutError("it takes a copy of memory that is written later, or through it")
    complete: Any = (lambda given: given) if call.whole else call.complete(given)
    op, rank = replayed(call.node, call.graph, call.written), call.ranks.place

    def kept(value: Tensor, at: SequenceDim | None) -> Tensor:
        return value if at is None else take(value, at, rank)

    def run(*args: Any, **named: Any) -> Any:
        args, named = complete((args, named))
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
    _only_sequence(call, call.args[0], place, does="slides over")
    if goes == came:
        return place
    if not transposed and _of(stride, at) == 1:
        last = _of(dilation, at) * (call.shape(weight)[place.dim] - 1) - _of(padding, at)
        return SequenceDim(place.dim, 1, place.span.part(last, last + goes))
    ranks = call.ranks.parts
    return SequenceDim(place.dim, 1, PositionSpan(goes, 0, goes, ranks)) if goes >= 2 * ranks else None


def _of(given: Sequence[int], at: int) -> int:
    """The entry of a dim; one entry is that of all."""
    return given[at] if len(given) > 1 else given[0]


# ---- matrix products ----


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
        call.want(one, either)
        call.want(other, either)
        return _placed(call, either, None)
    if first is not None and first.dim == rows:
        return _placed(call, first, None if second is None else -1)
    if second is not None and second.dim == columns:
        return _placed(call, second, None if first is None else -2)
    return _summed(call, either.at(columns))


def _placed(call: RuleCall, place: SequenceDim, gathers: int | None) -> list[SequenceDim | None]:
    """The output is cut at `place`. gathers: the argument of which all positions are needed."""
    if len(call.args) > 2:
        _term(call, call.args[0], place)
    if gathers is not None:
        op, complete = call.node.op, call.complete([call.args[gathers]])

        def run(*args: Any, **named: Any) -> Any:
            given = [*args]
            given[gathers] = complete(given[gathers])
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
    total = call.total()

    def run(*args: Any, beta: float = 1, alpha: float = 1) -> Tensor:
        made = total(torch.matmul(*args[-2:]))
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


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided"),
        lambda _: [None],
    ),
    **dict.fromkeys(("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like"), _created),
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze"), _view),
    **dict.fromkeys(("aten._reshape_alias", "aten.squeeze"), _view),
    **dict.fromkeys(("aten.view_as_complex", "aten.view_as_real"), _complex_view),
    "aten.expand": _expand,
    "aten.select": _select,
    "aten.slice": _slice,
    "aten.cat": _cat,
    "aten.constant_pad_nd": _padded,
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"), product),
    "aten.convolution": convolution,
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten.native_group_norm"), all_positions),
    **dict.fromkeys(ALONG, _along),
    "aten.histc": _histogram,
    **dict.fromkeys(("aten.sum", "aten.mean"), _sum),
    **dict.fromkeys(("aten.nll_loss_forward", "aten.nll_loss2d_forward"), _nll),
    **dict.fromkeys(("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss"), _distance(2)),
    "aten.binary_cross_entropy": _distance(3),
    "unisono.tensor_move": _tensor_move,
    EXPERTS: _experts,
    EXPERT_LIST: _listed,
    ATTENTION: _attention,
}  # fmt: skip
