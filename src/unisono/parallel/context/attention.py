"""Attention over a sequence that is cut over ranks: as a ring (ring.py), or by an exchange of heads.

Heads: an all-to-all gives each rank the whole sequence of some heads, PyTorch's own attention runs on these,
and another one gives the results back. Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.nn import functional

from unisono.parallel.costs.collectives import Link

from .exchange import ContextGroup
from .layout import PositionSpan
from .ring import Attention, local_runs, ring

__all__ = ["attend", "heads_are_cheaper"]


def heads_are_cheaper(shapes: Sequence[Sequence[int]], itemsize: int, ranks: int, link: Link) -> bool:
    """Whether an exchange of heads costs less than a ring, forward and backward.

    Shapes: those of q [rows, heads, time, features], k and v, whole.
    Cost: 8 all-to-alls against 2 (n - 1) messages of keys and values and n of their gradients, in f32.
    """
    q, k, v = shapes
    if len(q) != 4 or q[1] % ranks or k[1] % ranks or v[1] % ranks:
        return False
    out = (*q[:-1], v[-1])
    sizes = [math.prod(shape) / ranks * itemsize for shape in (q, k, v, out)]
    exchanged = 2 * sum(link.seconds("all_to_all", ranks, nbytes) for nbytes in sizes)
    both = math.prod(k) / ranks + math.prod(v) / ranks
    byte_s = link.byte_s + link.copy_s  # keys and values are packed into one message
    hop, back = (link.latency_s + byte_s * both * size for size in (itemsize, 4))
    return exchanged <= 2 * (ranks - 1) * hop + ranks * back


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, ranks: ContextGroup
) -> Tensor:
    """What this rank's queries see of all keys.

    Shapes: q [..., heads, this rank's time, features]; k, v likewise, with fewer heads if these are grouped;
    mask whole, [..., queries or 1, keys or 1], bool or floating, or None.
    """
    if how.heads:
        return _by_heads(q, k, v, mask, how, ranks)
    lead = q.shape[:-2]
    if mask is not None:  # to as many dims as the scores
        mask = mask[(None,) * (q.dim() - mask.dim())]
        if q.dim() > 4 and mask.shape[:-3] != lead[:-1]:
            mask = mask.expand(*lead[:-1], *mask.shape[-3:])
        mask = _four(mask)
    out = ring(_four(q), _four(k), _four(v), mask, how, ranks)
    return out.reshape(*lead, *out.shape[-2:])


def _four(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4) if x.dim() > 4 else x


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, ranks: ContextGroup
) -> Tensor:
    assert how.keys is not None
    q = _ToHeads.apply(q, how.queries, ranks, how.label)
    k, v = (_ToHeads.apply(t, how.keys, ranks, how.label) for t in (k, v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.chunk(ranks.ranks, -3)[ranks.rank]
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, how.dropout, how.causal, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    back: Tensor = _ToPositions.apply(out, how.queries, ranks, how.label)
    return back


def _to_heads(x: Tensor, span: PositionSpan, ranks: ContextGroup, label: str) -> Tensor:
    """[rows, heads, this rank's time, features] -> [rows, heads / n, time, features]."""
    rows, heads, _, features = x.shape
    count = heads // ranks.ranks
    sent = torch.cat([part.flatten() for part in x.chunk(ranks.ranks, 1)])
    sizes = [rows * count * span.count(rank) * features for rank in range(ranks.ranks)]
    came = x.new_empty(sum(sizes))
    with record_function(label):
        ranks.exchange(came, sent, sizes, [x.numel() // ranks.ranks] * ranks.ranks)
    made = x.new_empty(rows, count, span.size, features)
    for rank, part in enumerate(came.split(sizes)):
        here = part.view(rows, count, span.count(rank), features)
        for first, last, position in local_runs(span.runs(rank)):
            made[:, :, position : position + last - first] = here[:, :, first:last]
    return made


def _to_positions(x: Tensor, span: PositionSpan, ranks: ContextGroup, label: str) -> Tensor:
    """[rows, heads / n, time, features] -> [rows, heads, this rank's time, features]."""
    rows, count, _, features = x.shape
    parts = [
        torch.cat([x[:, :, begin:end] for begin, end in span.runs(rank)] or [x[:, :, :0]], 2).flatten()
        for rank in range(ranks.ranks)
    ]
    mine = rows * count * span.count(ranks.rank) * features
    came = x.new_empty(ranks.ranks * mine)
    with record_function(label):
        ranks.exchange(came, torch.cat(parts), [mine] * ranks.ranks, [part.numel() for part in parts])
    every = came.view(ranks.ranks, rows, count, span.count(ranks.rank), features)
    return torch.cat(every.unbind(0), 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: PositionSpan, ranks: ContextGroup, label: str) -> Tensor:
        ctx.how = span, ranks, label
        return _to_heads(x, span, ranks, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_positions(grad, *ctx.how), None, None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: PositionSpan, ranks: ContextGroup, label: str) -> Tensor:
        ctx.how = span, ranks, label
        return _to_positions(x, span, ranks, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_heads(grad, *ctx.how), None, None, None
