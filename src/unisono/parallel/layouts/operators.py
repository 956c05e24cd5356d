"""Operators in index notation: the index of each dim of inputs and output, and a rank's computation on its
parts.

    "*mk,*kn->*mn"      matmul; k is contracted: where it is cut, the output is a partial sum

A letter is an index of one dim. `*` stands for all dims before, which are broadcast as PyTorch does it. What
a rank computes is, by one convention, its share: outputs add up over the ranks that cut an index which they
do not have.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.nn import functional

from unisono.parallel.gradients import span
from unisono.parallel.graph.indices import groups_of

from .redistribute import SUM, WHOLE, Layout

Shape = tuple[int, ...]
Indices = tuple[str | None, ...]
Owners = tuple[str | None, ...]  # for each mesh axis, the index it cuts


class OperatorSignature(NamedTuple):
    """One operator on given shapes.

    Args:
        inputs: for each tensor one index per dim; None: a dim of size 1 that is broadcast.
        local: takes a rank's `IndexPosition`, and its parts of the tensors.
        whole: index -> why it cannot be cut.
        leads: index -> the size of the output's dim that it leads, which its parts must divide, too.
    """

    inputs: tuple[Indices, ...]
    output: Indices
    local: Callable[..., Tensor]
    whole: dict[str, str] = {}  # noqa: RUF012  (never written)
    leads: dict[str, int] = {}  # noqa: RUF012


Rule = Callable[..., OperatorSignature]  # of the shapes of tensors, then the other arguments


class IndexPosition:
    """A rank's part of one call: its place along each index that is cut.

    Args:
        ranks: OperatorRanks; None: nothing is cut.
    Attributes:
        sizes: of all indices.
    """

    def __init__(
        self, where: str, sizes: dict[str | None, int], owners: Owners = (), ranks: Any = None
    ) -> None:
        self._where, self.sizes, self._owners, self._ranks = where, sizes, owners, ranks

    def start(self, index: str) -> int:
        """The number of the first element of an index that is here."""
        places = [] if self._ranks is None else self._ranks.places
        cut = [place for owner, place in zip(self._owners, places, strict=True) if owner == index]
        return span(self.sizes[index], cut)[0]

    def total(self, value: Tensor, index: str) -> Tensor:
        """The sum over all parts, differentiable: what each rank does with it counts."""
        return self._reduced(value, index, SUM)

    def largest(self, value: Tensor, index: str) -> Tensor:
        """The maximum over all parts, not differentiable."""
        return self._reduced(value.detach(), index, Partial("max"))

    def _reduced(self, value: Tensor, index: str, of: Partial) -> Tensor:
        if index not in self._owners:
            return value
        parts: Layout = tuple(of if owner == index else WHOLE for owner in self._owners)
        moved: Tensor = self._ranks.move(value, value.shape, (parts, self._ranks.whole), parts, self._where)
        return moved


def rule_of(function: Any) -> Rule:
    """Find the rule of a function of torch; a ValueError lists those that have one."""
    if function not in RULES:
        names = ", ".join(sorted({known.__name__ for known in RULES}))
        raise ValueError(
            f"shard: no rule for {getattr(function, '__name__', function)!r}. There are rules for "
            f"{names}; another function can be composed of these"
        )
    return RULES[function]


def _notation(text: str, local: Callable[..., Tensor], whole: dict[str, str] | None = None) -> Rule:
    """The rule of an operator in index notation; `local` takes its further arguments by name."""
    came, goes = text.split("->")
    terms, parameters = came.split(","), inspect.signature(local)

    def rule(*shapes: Shape, **named: Any) -> OperatorSignature:
        parameters.bind(None, *shapes, **named)
        if len(shapes) > len(terms):
            raise TypeError(f"{local.__name__.strip('_')}: {len(shapes)} tensors for {text}")
        letters = [term.lstrip("*") for term in terms]
        for term, own, shape in zip(terms, letters, shapes, strict=False):  # a bias may be left out
            if len(shape) < len(own) or (len(shape) > len(own) and term == own):
                name = local.__name__.strip("_")
                raise ValueError(
                    f"{name}: an input must have the dimensions {term} of {text}, and has {list(shape)}"
                )
        fronts, out = _aligned([x[: len(x) - len(own)] for x, own in zip(shapes, letters, strict=False)])
        inputs = tuple((*front, *own) for front, own in zip(fronts, letters, strict=False))
        output = (*out * goes.startswith("*"), *goes.lstrip("*"))
        return OperatorSignature(inputs, output, functools.partial(local, **named), whole or {})

    return rule


def _aligned(shapes: Sequence[Shape]) -> tuple[list[Indices], Indices]:
    """Indices of tensors that are broadcast against each other. Example: [3, 4], [4] -> (b0, b1), (b1)."""
    rank = max(map(len, shapes))
    out = torch.broadcast_shapes(*shapes)
    inputs = [
        tuple(
            f"b{rank - len(shape) + dim}" if size == out[rank - len(shape) + dim] else None
            for dim, size in enumerate(shape)
        )
        for shape in shapes
    ]
    return inputs, tuple(f"b{dim}" for dim in range(rank))


def _on_parts(function: Callable[..., Tensor], text: str, whole: dict[str, str] | None = None) -> Rule:
    """The rule of a function that a rank calls on its parts."""

    def local(_: IndexPosition, *parts: Tensor, **named: Any) -> Tensor:
        return function(*parts, **named)

    local.__name__ = function.__name__
    return _notation(text, local, whole)


def _of_dims(function: Callable[..., Tensor]) -> Rule:
    """The rule of a function of one tensor that keeps, moves or sums dims: which, a trial tells."""

    def rule(x: Shape, *args: Any, **named: Any) -> OperatorSignature:
        marks = range(2, 2 + len(x))
        tried = function(torch.empty(*marks, device="meta"), *args, **named)
        output = tuple(f"i{size - 2}" if size in marks else None for size in tried.shape)
        summed = math.prod(x[dim] for dim in range(len(x)) if f"i{dim}" not in output)

        def local(_: IndexPosition, x: Tensor) -> Tensor:
            result = function(x, *args, **named)
            return result if function is not torch.mean else result * (x.numel() / result.numel() / summed)

        return OperatorSignature((_dims(x),), output, local)

    return rule


def _dims(x: Shape) -> Indices:
    return tuple(f"i{dim}" for dim in range(len(x)))


# ---- what a rank computes, where it is more than the operator on its parts ----


def _linear(part: IndexPosition, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = functional.linear(x, weight)
    return result if bias is None else result + bias * float(part.start("k") == 0)


def _rows_here(part: IndexPosition, numbers: Tensor, count: int, known: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each number in this rank's part, and whether it has it; an unknown one is beyond all rows,
    so that the next operator raises PyTorch's own error.
    """
    here = numbers - part.start("v")
    mine = (here >= 0) & (here < count)
    return torch.where(known, here * mine, count), mine


def _wide(x: Tensor) -> Tensor:
    """In f32, where PyTorch's own kernels compute so."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _embedding(part: IndexPosition, tokens: Tensor, weight: Tensor) -> Tensor:
    here, mine = _rows_here(part, tokens, len(weight), (tokens >= 0) & (tokens < part.sizes["v"]))
    return functional.embedding(here, weight) * mine.unsqueeze(-1)


def _layer_norm(
    part: IndexPosition,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """The last dim is normalized; it may be cut."""
    width, kind, x = part.sizes["k"], x.dtype, _wide(x)
    centred = x - part.total(x.sum(-1, keepdim=True), "k") / width
    variance = part.total((centred * centred).sum(-1, keepdim=True), "k") / width
    result = centred * torch.rsqrt(variance + eps)
    result = result if weight is None else result * weight
    return (result if bias is None else result + bias).to(kind)


def _cross_entropy(
    part: IndexPosition, logits: Tensor, targets: Tensor, *, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Rows and classes may be cut."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross_entropy: reduction={reduction!r}, expected mean or sum")
    kind, logits = logits.dtype, _wide(logits)
    top = part.largest(logits.amax(1, keepdim=True), "v")
    log_sum = torch.log(part.total(torch.exp(logits - top).sum(1, keepdim=True), "v")) + top
    known = ((targets >= 0) & (targets < part.sizes["v"])) | (targets == ignore_index)
    here, mine = _rows_here(part, targets, logits.shape[1], known)
    picked = torch.where(mine.unsqueeze(1), logits.gather(1, here.unsqueeze(1)), 0)
    counts = (targets != ignore_index).unsqueeze(1)
    # every rank along the classes has the same log_sum: the first one counts it
    each = log_sum * float(part.start("v") == 0) - picked
    total = torch.where(counts, each, 0).sum()
    return (total / part.total(counts.sum(), "r") if reduction == "mean" else total).to(kind)


# ---- rules that need the arguments ----


def _attention(*qkv: Shape, is_causal: bool = False) -> OperatorSignature:
    whole = {"d": "scores need all features of a head", "s": "softmax runs over all keys"}
    if is_causal:
        whole["t"] = "a causal mask needs to know which queries these are"
    rule = _on_parts(functional.scaled_dot_product_attention, "*td,*sd,*se->*te", whole)
    return rule(*qkv, is_causal=is_causal)


def _softmax(x: Shape, dim: int) -> OperatorSignature:
    indices = _dims(x)
    over = f"i{dim % len(x)}"

    def local(part: IndexPosition, x: Tensor) -> Tensor:
        shifted = torch.exp(_wide(x) - part.largest(_wide(x).amax(dim, keepdim=True), over))
        return (shifted / part.total(shifted.sum(dim, keepdim=True), over)).to(x.dtype)

    return OperatorSignature((indices,), indices, local)


def _reshape(x: Shape, shape: Sequence[int]) -> OperatorSignature:
    """Dims that are merged or split: the leading one of each group may be cut, where it stays a whole
    number.
    """
    known = math.prod(size for size in shape if size >= 0)
    goal = tuple(math.prod(x) // known if size < 0 else size for size in shape)
    inputs: list[str | None] = [None] * len(x)
    output: list[str | None] = [None] * len(goal)
    whole: dict[str, str] = {}
    leads: dict[str, int] = {}
    firsts: dict[int, int] = {}  # dim of the output -> dim of the input
    for number, (came, goes) in enumerate(groups_of(x, goal)):
        lead = f"g{number}"
        for at in came:
            inputs[at] = lead if at == came[0] else f"{lead}.{at}"
        for at in came[1:]:
            whole[f"{lead}.{at}"] = "only the first of the dimensions that are merged or split can be cut"
        if came and goes:
            output[goes[0]], firsts[goes[0]] = lead, came[0]
        if came and goes and len(came + goes) > 2:
            leads[lead] = goal[goes[0]]

    def local(_: IndexPosition, part: Tensor) -> Tensor:
        sizes = [
            size * part.shape[firsts[dim]] // x[firsts[dim]] if dim in firsts else size
            for dim, size in enumerate(goal)
        ]
        return part.reshape(sizes)

    return OperatorSignature((tuple(inputs),), tuple(output), local, whole, leads)


def _convolution(function: Callable[..., Tensor], space: str, window: str) -> Rule:
    """The rule of a convolution over the dims `space`: rows and channels may be cut."""
    whole = dict.fromkeys(space, "a window reads its neighbours") | dict.fromkeys(window, "it is a window")
    grouped = dict.fromkeys("coi", "each of the groups has channels of its own")

    def local(
        part: IndexPosition, x: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any
    ) -> Tensor:
        share = None if bias is None else bias * float(part.start("c") == 0)
        return function(x, weight, share, **named)

    def rule(*shapes: Shape, groups: int = 1, **named: Any) -> OperatorSignature:
        text = f"nc{space},o{'c' if groups == 1 else 'i'}{window},o->no{space.upper()}"
        found = _notation(text, local, whole if groups == 1 else whole | grouped)
        return found(*shapes, groups=groups, **named)

    local.__name__ = function.__name__
    return rule


UNARY = (
    torch.relu, torch.tanh, torch.exp, torch.neg, torch.sigmoid, torch.sqrt, torch.abs, torch.clone,
    functional.relu, functional.gelu, functional.silu, functional.tanh,
)  # fmt: skip
BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
RULES: dict[Any, Rule] = {
    **{one: _of_dims(one) for one in (*UNARY, torch.sum, torch.mean, torch.transpose, torch.permute)},
    **{one: _on_parts(one, "*,*->*") for one in BINARY},
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _on_parts(torch.matmul, "*mk,*kn->*mn")),
    functional.linear: _notation("*k,nk,n->*n", _linear),
    functional.embedding: _notation("*,vd->*d", _embedding),
    functional.layer_norm: _notation("*k,k,k->*k", _layer_norm),
    functional.cross_entropy: _notation("rv,r->", _cross_entropy),
    functional.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.softmax, functional.softmax), _softmax),
    torch.reshape: _reshape,
    functional.conv1d: _convolution(functional.conv1d, "x", "j"),
    functional.conv2d: _convolution(functional.conv2d, "xy", "jk"),
    functional.conv3d: _convolution(functional.conv3d, "xyz", "jkl"),
}  # fmt: skip
