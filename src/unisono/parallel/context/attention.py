"""Attention over a sequence that is cut over ranks: as a ring, or by an exchange of heads.

Ring: keys and values travel from rank to rank, and what is seen of each part is merged by log-sum-exp. In
backward they travel again, with their gradients. No rank has more than two parts of keys and values, nor
more than TILE x TILE scores of each head. Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise
Transformers, arXiv:2310.01889.

Heads: an all-to-all gives each rank the whole sequence of some heads, PyTorch's own attention runs on these,
and another one gives the results back. Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.nn import functional

from unisono.parallel.costs.collectives import Link
from unisono.parallel.generators import drawn_seed, seed_of
from unisono.parallel.tensor_moves import TensorAxis, exchanged

from .layout import PositionSpan

TILE = 512  # rows and columns of the scores that exist at a time


@dataclass(frozen=True)
class Attention:
    """One call of scaled_dot_product_attention.

    Args:
        queries: the positions of q.
        keys: those of k and v; None: every rank has all of them.
        causal: position i sees the keys up to number i.
        scale: of the scores.
        heads: it runs by an exchange of heads.
        label: in a trace.
    """

    queries: PositionSpan
    keys: PositionSpan | None
    causal: bool
    dropout: float
    scale: float
    heads: bool
    label: str


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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, ranks: TensorAxis) -> Tensor:
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
    seed = (drawn_seed() or 0) if how.dropout else 0
    out: Tensor = _Ring.apply(_four(q), _four(k), _four(v), mask, how, ranks, seed)
    return out.reshape(*lead, *out.shape[-2:])


def _four(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4) if x.dim() > 4 else x


# ---- by an exchange of heads ----


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, ranks: TensorAxis
) -> Tensor:
    assert how.keys is not None

    def moves(span: PositionSpan) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        told: dict[str, Any] = {"span": span, "ranks": ranks, "label": how.label}
        return partial(_to_heads, **told), partial(_to_positions, **told)

    q = exchanged(q, *moves(how.queries))
    k, v = (exchanged(t, *moves(how.keys)) for t in (k, v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.chunk(ranks.parts, -3)[ranks.place]
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, how.dropout, how.causal, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return exchanged(out, *reversed(moves(how.queries)))


def _to_heads(x: Tensor, span: PositionSpan, ranks: TensorAxis, label: str) -> Tensor:
    """[rows, heads, this rank's time, features] -> [rows, heads / n, time, features]."""
    rows, heads, _, features = x.shape
    count = heads // ranks.parts
    sent = torch.cat([part.flatten() for part in x.chunk(ranks.parts, 1)])
    sizes = [rows * count * span.count(rank) * features for rank in range(ranks.parts)]
    came = x.new_empty(sum(sizes))
    with record_function(label):
        given = [x.numel() // ranks.parts] * ranks.parts
        dist.all_to_all_single(came, sent, sizes, given, group=ranks.group)
    made = x.new_empty(rows, count, span.size, features)
    for rank, part in enumerate(came.split(sizes)):
        here = part.view(rows, count, span.count(rank), features)
        for first, last, position in _local_runs(span.runs(rank)):
            made[:, :, position : position + last - first] = here[:, :, first:last]
    return made


def _to_positions(x: Tensor, span: PositionSpan, ranks: TensorAxis, label: str) -> Tensor:
    """[rows, heads / n, time, features] -> [rows, heads, this rank's time, features]."""
    rows, count, _, features = x.shape
    parts = [
        torch.cat([x[:, :, begin:end] for begin, end in span.runs(rank)] or [x[:, :, :0]], 2).flatten()
        for rank in range(ranks.parts)
    ]
    mine = rows * count * span.count(ranks.place) * features
    came = x.new_empty(ranks.parts * mine)
    with record_function(label):
        sizes = [mine] * ranks.parts, [part.numel() for part in parts]
        dist.all_to_all_single(came, torch.cat(parts), *sizes, group=ranks.group)
    every = came.view(ranks.parts, rows, count, span.count(ranks.place), features)
    return torch.cat(every.unbind(0), 1)


# ---- as a ring ----


class _Tile(NamedTuple):
    """Some queries against some keys: local bounds of both, and the first position of each."""

    rows: slice
    columns: slice
    row: int
    column: int
    number: int

    @property
    def hides(self) -> bool:
        """Whether a causal mask hides a part of it."""
        keys: int = self.columns.stop - self.columns.start
        return self.row < self.column + keys - 1


def _local_runs(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """(local begin, local end, position) of each run."""
    at = 0
    for begin, end in runs:
        yield at, at + end - begin, begin
        at += end - begin


def _tiles(how: Attention, rank: int, owner: int, keys: int) -> Iterator[_Tile]:
    """The tiles of this rank's queries and the keys of `owner`, without those that are hidden."""
    number = 0
    runs = ((0, keys),) if how.keys is None else how.keys.runs(owner)
    for begin, end, row in _pieces(how.queries.runs(rank)):
        for left, right, column in _pieces(runs):
            number += 1
            if not (how.causal and row + (end - begin) - 1 < column):
                yield _Tile(slice(begin, end), slice(left, right), row, column, number)


def _pieces(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """(local begin, local end, position) of pieces of runs."""
    for first, last, position in _local_runs(runs):
        for begin in range(first, last, TILE):
            yield begin, min(begin + TILE, last), position + begin - first


class _ScoreTiles:
    """This rank's queries against the keys and values of one rank: [rows, key heads, group, time, features].

    A group is the query heads that share a key head.
    """

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, how: Attention) -> None:
        self._how, self._mask = how, mask
        self.groups = q.shape[1] // k.shape[1]
        self.kind = torch.promote_types(q.dtype, torch.float32)

    def grouped(self, q: Tensor, rows: slice) -> Tensor:
        """Some rows of what has query heads."""
        found: Tensor = q[:, :, rows].to(self.kind).unflatten(1, (-1, self.groups))
        return found

    def tile(self, x: Tensor, columns: slice) -> Tensor:
        """Some columns of keys or values."""
        return x[:, :, columns].to(self.kind)

    def scores(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        """Of one tile, with what is hidden at -inf. q is grouped."""
        product = _product(q, k.transpose(-1, -2)) * self._how.scale
        if self._mask is not None:
            mask = self.masked(tile)
            if mask.dtype == torch.bool:
                product = product.masked_fill(~mask, -math.inf)
            else:
                product = product + mask
        if self._how.causal and tile.hides:
            rows, columns = product.shape[-2:]
            seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(tile.row - tile.column)
            product = product.masked_fill(~seen, -math.inf)
        return product

    def masked(self, tile: _Tile, of: Tensor | None = None) -> Tensor:
        """The mask, or what is like it, at a tile: it can be broadcast to its scores."""
        mask = self._mask if of is None else of
        assert mask is not None
        rows, columns = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        if mask.shape[-2] > 1:
            mask = mask.narrow(-2, tile.row, rows)
        if mask.shape[-1] > 1:
            mask = mask.narrow(-1, tile.column, columns)
        return mask.unflatten(1, (-1, self.groups)) if mask.shape[1] > 1 else mask.unsqueeze(1)

    def kept(self, like: Tensor, seed: int, owner: int, tile: _Tile) -> Tensor | None:
        """What dropout keeps of a tile, divided by its share; the same again in backward."""
        if not self._how.dropout:
            return None
        generator = torch.Generator(like.device).manual_seed(seed_of(seed, owner, tile.number))
        share = 1 - self._how.dropout
        return (
            torch.bernoulli(torch.full_like(like, share), generator=generator) / share if share else like * 0
        )


def _product(one: Tensor, other: Tensor) -> Tensor:
    """[rows, key heads, group, time, a] x [rows, key heads, a, b], without copies of the second."""
    group, time = one.shape[2:4]
    found: Tensor = torch.matmul(one.flatten(2, 3), other).unflatten(2, (group, time))
    return found


def _over(one: Tensor, other: Tensor) -> Tensor:
    """Sums over group and time: [rows, key heads, a, b]."""
    return torch.matmul(one.flatten(2, 3).transpose(-1, -2), other.flatten(2, 3))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, ranks: TensorAxis,
        seed: int,
    ) -> Tensor:  # fmt: skip
        part = _ScoreTiles(q, k, mask, how)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=part.kind, device=q.device)
        log_sum = torch.full(q.shape[:-1], -math.inf, dtype=part.kind, device=q.device)
        outs, sums = out.unflatten(1, (-1, part.groups)), log_sum.unflatten(1, (-1, part.groups))
        for owner, keys, values in _travel(k, v, how, ranks):
            for tile in _tiles(how, ranks.place, owner, keys.shape[2]):
                scores = part.scores(part.grouped(q, tile.rows), part.tile(keys, tile.columns), tile)
                before = sums[..., tile.rows]
                after = torch.logaddexp(before, scores.logsumexp(-1))
                base = after.masked_fill(after == -math.inf, 0.0)  # rows that see nothing yet
                weights = (scores - base.unsqueeze(-1)).exp_()
                kept = part.kept(weights, seed, owner, tile)
                if kept is not None:
                    weights = weights * kept
                seen = outs[..., tile.rows, :]
                seen *= (before - base).exp().unsqueeze(-1)
                seen += _product(weights, part.tile(values, tile.columns))
                sums[..., tile.rows] = after
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.how = how, ranks, seed
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, mask, out, log_sum = ctx.saved_tensors
        how, ranks, seed = ctx.how
        part = _ScoreTiles(q, k, mask, how)
        grad_q = torch.zeros(q.shape, dtype=part.kind, device=q.device)
        grads = grad_q.unflatten(1, (-1, part.groups))
        grad_mask = (
            torch.zeros(mask.shape, dtype=part.kind, device=q.device) if ctx.needs_input_grad[3] else None
        )
        share = (grad.to(part.kind) * out).sum(-1)
        shares, sums = (t.unflatten(1, (-1, part.groups)) for t in (share, log_sum))
        home = _GradientsOfKeys(k, v, part.kind, how, ranks)
        for owner, keys, values in _travel(k, v, how, ranks):
            grad_k, grad_v = home.of(owner)
            for tile in _tiles(how, ranks.place, owner, keys.shape[2]):
                rows, columns = tile.rows, tile.columns
                queries, here = part.grouped(q, rows), part.grouped(grad, rows)
                key, value = part.tile(keys, columns), part.tile(values, columns)
                base = sums[..., rows].masked_fill(sums[..., rows] == -math.inf, 0.0)
                weights = (part.scores(queries, key, tile) - base.unsqueeze(-1)).exp_()
                kept = part.kept(weights, seed, owner, tile)
                grad_weights = _product(here, value.transpose(-1, -2))
                if kept is None:
                    grad_v[:, :, columns] += _over(weights, here)
                else:
                    grad_v[:, :, columns] += _over(weights * kept, here)
                    grad_weights = grad_weights * kept
                grad_scores = weights * (grad_weights - shares[..., rows].unsqueeze(-1))
                if grad_mask is not None:
                    there = part.masked(tile, grad_mask)
                    there += grad_scores.sum_to_size(there.shape)
                grads[..., rows, :] += _product(grad_scores, key) * how.scale
                grad_k[:, :, columns] += _over(grad_scores, queries) * how.scale
            home.done(owner)
        grad_k, grad_v = home.finish()
        found = grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return *found, None if grad_mask is None else grad_mask.to(mask.dtype), None, None, None


def _travel(k: Tensor, v: Tensor, how: Attention, ranks: TensorAxis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, keys, values) of every rank; the next ones travel while these are used."""
    if how.keys is None:
        yield ranks.place, k, v
        return
    for step in range(ranks.parts):
        owner = (ranks.place - step) % ranks.parts
        hop = None
        if step + 1 < ranks.parts:
            count = how.keys.count((owner - 1) % ranks.parts)
            hop = _RingExchange([k, v], count, ranks, how.label)
        yield owner, k, v
        if hop is not None:
            k, v = hop.received()


class _GradientsOfKeys:
    """Gradients of keys and values: they follow their owners' keys around the ring, one hop more."""

    def __init__(self, k: Tensor, v: Tensor, kind: torch.dtype, how: Attention, ranks: TensorAxis) -> None:
        self._how, self._ranks = how, ranks
        self._held = [torch.zeros(t.shape, dtype=kind, device=t.device) for t in (k, v)]
        self._hop: _RingExchange | None = None

    def of(self, _owner: int) -> list[Tensor]:
        """The gradients so far."""
        if self._hop is not None:
            self._held, self._hop = self._hop.received(), None
        return self._held

    def done(self, owner: int) -> None:
        """Send them on."""
        if self._how.keys is not None:
            count = self._how.keys.count((owner - 1) % self._ranks.parts)
            self._hop = _RingExchange(self._held, count, self._ranks, self._how.label)

    def finish(self) -> list[Tensor]:
        """Those of this rank's keys and values."""
        return self.of(self._ranks.place)


class _RingExchange:
    """One message to the next rank of the ring, and one from the rank before."""

    def __init__(self, tensors: list[Tensor], count: int, ranks: TensorAxis, label: str) -> None:
        self._shapes = [(*t.shape[:2], count, t.shape[3]) for t in tensors]
        self._sent = torch.cat([t.flatten() for t in tensors])
        self._came = self._sent.new_empty(sum(math.prod(shape) for shape in self._shapes))
        if ranks.parts == 1:
            self._came, self._works = self._sent, []
            return
        after, before = (
            dist.get_global_rank(ranks.group, (ranks.place + step) % ranks.parts) for step in (1, -1)
        )
        sent = dist.P2POp(dist.isend, self._sent, after, ranks.group)
        with record_function(label):
            came = dist.P2POp(dist.irecv, self._came, before, ranks.group)
            self._works = dist.batch_isend_irecv([sent, came])

    def received(self) -> list[Tensor]:
        """Wait; return what came."""
        for work in self._works:
            work.wait()
        sizes = [math.prod(shape) for shape in self._shapes]
        return [t.view(shape) for t, shape in zip(self._came.split(sizes), self._shapes, strict=True)]
