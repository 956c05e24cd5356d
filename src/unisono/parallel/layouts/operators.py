"""Operators in index notation: the index of each dim of inputs and output, and a rank's computation on its
parts.

    matmul [m, k] @ [k, n] -> [m, n]      k is contracted: where it is cut, the output is a partial sum

Each rule returns a Signature for given shapes. `local` gets the ranks' `IndexPosition` and the local
tensors. What it returns is, by one convention, this rank's share: outputs add up over the axes of every index
they do not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["IndexPosition", "OperatorSignature", "rule_of"]

Shape = tuple[int, ...]


class IndexPosition(Protocol):
    """A rank's position along an index."""

    def parts(self, index: str) -> int:
        """The number of parts of the index."""
        ...

    def place(self, index: str) -> int:
        """The number of this rank's part."""
        ...

    def total(self, value: Tensor, index: str) -> Tensor:
        """The sum over all parts, differentiable."""
        ...

    def largest(self, value: Tensor, index: str) -> Tensor:
        """The maximum over all parts, not differentiable."""
        ...


class OperatorSignature(NamedTuple):
    """One operator on given shapes.

    Args:
        inputs: for each tensor one index per dim; None: a dim of size 1 that is broadcast.
        whole: index -> why it cannot be cut.
        leads: index -> the size of the output's dim that it leads, which its parts must divide, too.
    """

    inputs: tuple[tuple[str | None, ...], ...]
    output: tuple[str | None, ...]
    local: Callable[..., Tensor]
    whole: dict[str, str] = {}  # noqa: RUF012  (never written)
    leads: dict[str, int] = {}  # noqa: RUF012


def rule_of(function: Any) -> Callable[..., OperatorSignature]:
    """Find the rule of a function of torch.

    Raises:
        ValueError: there is none; the text lists the existing ones.
    """
    rule = RULES.get(function)
    if rule is None:
        names = ", ".join(sorted({known.__name__ for known in RULES}))
        raise ValueError(
            f"shard: no rule for {getattr(function, '__name__', function)!r}. There are rules for "
            f"{names}; another "
            "function can be composed of these"
        )
    return rule


def _aligned(shapes: Sequence[Shape]) -> tuple[list[tuple[str | None, ...]], tuple[str | None, ...]]:
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


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., OperatorSignature]:
    def rule(*shapes: Shape, **named: Any) -> OperatorSignature:
        inputs, output = _aligned(shapes)
        return OperatorSignature(tuple(inputs), output, lambda _, *tensors: function(*tensors, **named))

    return rule


def _matmul(a: Shape, b: Shape) -> OperatorSignature:
    if len(a) < 2 or len(b) < 2:
        raise ValueError(f"matmul: inputs must have two dimensions at least, not {len(a)} and {len(b)}")
    batch, out = _aligned([a[:-2], b[:-2]])
    return OperatorSignature(
        ((*batch[0], "m", "k"), (*batch[1], "k", "n")), (*out, "m", "n"), lambda _, x, y: x @ y
    )


def _linear(x: Shape, weight: Shape, *bias: Shape) -> OperatorSignature:  # noqa: ARG001
    rows = tuple(f"r{dim}" for dim in range(len(x) - 1))

    def local(part: IndexPosition, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        result = functional.linear(x, weight)
        return result + bias[0] * float(part.place("k") == 0) if bias else result

    return OperatorSignature(((*rows, "k"), ("n", "k"), *(("n",) for _ in bias)), (*rows, "n"), local)


def _embedding(tokens: Shape, weight: Shape) -> OperatorSignature:  # noqa: ARG001
    rows = tuple(f"r{dim}" for dim in range(len(tokens)))

    def local(part: IndexPosition, tokens: Tensor, weight: Tensor) -> Tensor:
        here = tokens - part.place("v") * len(weight)
        mine = (here >= 0) & (here < len(weight))
        return functional.embedding(here * mine, weight) * mine.unsqueeze(-1)

    return OperatorSignature((rows, ("v", "d")), (*rows, "d"), local)


def _softmax(x: Shape, dim: int) -> OperatorSignature:
    indices = tuple(f"i{at}" for at in range(len(x)))
    over = indices[dim]

    def local(part: IndexPosition, x: Tensor) -> Tensor:
        shifted = torch.exp(x - part.largest(x.detach().amax(dim, keepdim=True), over))
        return shifted / part.total(shifted.sum(dim, keepdim=True), over)

    return OperatorSignature((indices,), indices, local)


def _layer_norm(x: Shape, *affine: Shape, eps: float = 1e-5) -> OperatorSignature:
    """The last dim is normalized; it may be cut."""
    indices = tuple(f"i{at}" for at in range(len(x)))
    last = indices[-1]

    def local(part: IndexPosition, x: Tensor, *affine: Tensor) -> Tensor:
        width = x.shape[-1] * part.parts(last)
        centred = x - part.total(x.sum(-1, keepdim=True), last) / width
        variance = part.total((centred * centred).sum(-1, keepdim=True), last) / width
        result = centred * torch.rsqrt(variance + eps)
        for value, join in zip(affine, JOINS, strict=False):
            result = join(result, value)
        return result

    return OperatorSignature((indices, *((last,) for _ in affine)), indices, local)


def _attention(q: Shape, k: Shape, v: Shape, *, is_causal: bool = False) -> OperatorSignature:  # noqa: ARG001
    batch = tuple(f"b{dim}" for dim in range(len(q) - 2))
    whole = {"d": "scores need all features of a head", "s": "softmax runs over all keys"}
    if is_causal:
        whole["t"] = "a causal mask needs to know which queries these are"

    def local(_: IndexPosition, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    inputs = ((*batch, "t", "d"), (*batch, "s", "d"), (*batch, "s", "e"))
    return OperatorSignature(inputs, (*batch, "t", "e"), local, whole)


def _reduction(mean: bool) -> Callable[..., OperatorSignature]:
    def rule(x: Shape, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> OperatorSignature:
        dims = range(len(x)) if dim is None else [dim] if isinstance(dim, int) else dim
        over = {at % len(x) for at in dims}
        indices = tuple(f"i{at}" for at in range(len(x)))
        share = 1 / math.prod(x[at] for at in over) if mean else 1.0

        def local(_: IndexPosition, x: Tensor) -> Tensor:
            return (
                x.sum(sorted(over), keepdim=keepdim) * share if mean else x.sum(sorted(over), keepdim=keepdim)
            )

        output = [
            None if at in over else index for at, index in enumerate(indices) if keepdim or at not in over
        ]
        return OperatorSignature((indices,), tuple(output), local)

    return rule


def _transpose(x: Shape, first: int, second: int) -> OperatorSignature:
    order = list(range(len(x)))
    order[first], order[second] = order[second], order[first]
    return _permute(x, order)


def _permute(x: Shape, dims: Sequence[int]) -> OperatorSignature:
    indices = tuple(f"i{at}" for at in range(len(x)))
    return OperatorSignature((indices,), tuple(indices[at] for at in dims), lambda _, x: x.permute(*dims))


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
    for number, (came, goes) in enumerate(_groups(x, goal)):
        lead = f"g{number}"
        for at in came:
            inputs[at] = lead if at == came[0] else f"{lead}.{at}"
        if came and goes:
            output[goes[0]], leads[lead] = lead, goal[goes[0]]
        for at in came[1:]:
            whole[f"{lead}.{at}"] = "only the first of the dimensions that are merged or split can be cut"

    def local(part: IndexPosition, x: Tensor) -> Tensor:
        cut = [size // part.parts(index) if index else size for size, index in zip(goal, output, strict=True)]
        return x.reshape(cut)

    return OperatorSignature((tuple(inputs),), tuple(output), local, whole, leads)


def _groups(x: Shape, goal: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dims with the same number of elements. Example: (2, 3, 4) -> (6, 4): ([0, 1], [0]), ([2],
    [1]).
    """
    found, i, j = [], 0, 0
    while i < len(x) or j < len(goal):
        came, goes = [i] if i < len(x) else [], [j] if j < len(goal) else []
        left, right = math.prod(x[i : i + 1]), math.prod(goal[j : j + 1])
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= x[i]
                came.append(i)
                i += 1
            else:
                right *= goal[j]
                goes.append(j)
                j += 1
        found.append((came, goes))
    return found


def _cross_entropy(logits: Shape, targets: Shape, *, reduction: str = "mean") -> OperatorSignature:  # noqa: ARG001
    """[rows, classes], [rows] -> []. Both may be cut."""
    if len(logits) != 2 or reduction not in ("mean", "sum"):
        raise ValueError(
            f"cross_entropy: takes [rows, classes] and mean or sum, not {logits} and {reduction!r}"
        )
    share = 1 / logits[0] if reduction == "mean" else 1.0

    def local(part: IndexPosition, logits: Tensor, targets: Tensor) -> Tensor:
        top = part.largest(logits.detach().amax(1, keepdim=True), "v")
        log_sum = torch.log(part.total(torch.exp(logits - top).sum(1, keepdim=True), "v")) + top
        here = targets - part.place("v") * logits.shape[1]
        mine = (here >= 0) & (here < logits.shape[1])
        picked = logits.gather(1, (here * mine).unsqueeze(1)) * mine.unsqueeze(1)
        # every rank along the classes has the same log_sum: the first one counts it
        return (log_sum * float(part.place("v") == 0) - picked).sum() * share

    return OperatorSignature((("r", "v"), ("r",)), (), local)


JOINS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.mul, torch.add)  # of weight and bias
UNARY = (
    torch.relu, torch.tanh, torch.exp, torch.neg, torch.sigmoid, torch.sqrt, torch.abs, torch.clone,
    functional.relu, functional.gelu, functional.silu, functional.tanh,
)  # fmt: skip
BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
RULES: dict[Any, Callable[..., OperatorSignature]] = {
    **{function: _elementwise(function) for function in (*UNARY, *BINARY)},
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.softmax: _softmax,
    functional.softmax: _softmax,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
    torch.sum: _reduction(mean=False),
    torch.mean: _reduction(mean=True),
    torch.transpose: _transpose,
    torch.permute: _permute,
    torch.reshape: _reshape,
    functional.cross_entropy: _cross_entropy,
}
