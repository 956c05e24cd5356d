"""Many buffers in one call: small ones travel together, large ones one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple

from unisono.buffers import ITEMSIZES, view
from unisono.group.calls import Options, named
from unisono.group.collectives import Collectives
from unisono.group.layout import SIDES, Extents, spread, two_sides
from unisono.group.work import DoneWork, Work
from unisono.reduction import Op, ReduceOp

__all__ = ["Coalesced"]

SUM = ReduceOp.SUM
TOGETHER_BYTES = 64 * 1024
"""A buffer up to this size costs less to copy twice than to send by itself."""
PACKED_BYTES = 1 << 20
"""What travels together at most."""

Timeout = float | timedelta | None


class _Piece(NamedTuple):
    """One buffer of a call, or its output and its input. `numel`: of what a rank contributes."""

    dtype: int
    numel: int
    out: Extents
    given: Extents

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


class Coalesced(Collectives):
    """Collectives on lists of buffers, of any sizes and dtypes, the same on every rank.

    Each gives what the collective would give on one buffer after the other. Small buffers of one dtype are
    copied together, and cost one operation; whether one is small depends on nothing but its size. All are
    checked before the first byte moves. One `Work` stands for all of them.
    """

    def all_reduce_coalesced(
        self,
        xs: Sequence[Any],
        op: Op = SUM,
        *,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """`all_reduce` of each of `xs`."""
        options = Options(async_op, timeout, None, reproducible)
        return self._each_in_place("all_reduce", xs, True, options, op, 0)

    def broadcast_coalesced(
        self, xs: Sequence[Any], src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """`broadcast` of each of `xs`."""
        writable = self._caller.rank != src
        return self._each_in_place("broadcast", xs, writable, Options(async_op, timeout), SUM, src)

    def all_gather_coalesced(
        self, outs: Sequence[Any], xs: Sequence[Any], *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """`all_gather` of each of `xs` into that of `outs`."""
        return self._each_between("all_gather", outs, xs, Options(async_op, timeout), SUM)

    def reduce_scatter_coalesced(
        self,
        outs: Sequence[Any],
        inputs: Sequence[Any],
        op: Op = SUM,
        *,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """`reduce_scatter` of each of `inputs` into that of `outs`."""
        options = Options(async_op, timeout, None, reproducible)
        return self._each_between("reduce_scatter", outs, inputs, options, op)

    def _each_in_place(
        self, collective: str, xs: Sequence[Any], writable: bool, options: Options, op: Op, root: int
    ) -> Work | None:
        pieces = []
        for i, x in enumerate(xs):
            with _naming(f"{collective}_coalesced"):
                address, numel, dtype = view(x, writable, f"xs[{i}]")
            pieces.append(_Piece(dtype, numel, [(address, numel)], []))
        if writable:
            _check_apart(f"{collective}_coalesced", pieces, (1, 0))
        return self._run(collective, pieces, xs, options, op, root)

    def _each_between(
        self, collective: str, outs: Sequence[Any], givens: Sequence[Any], options: Options, op: Op
    ) -> Work | None:
        sides, caller, name = SIDES[collective], self._caller, f"{collective}_coalesced"
        if len(outs) != len(givens):
            raise ValueError(f"{name}: {len(outs)} outputs and {len(givens)} inputs, expected as many")
        pieces = []
        for i, (out, given) in enumerate(zip(outs, givens, strict=True)):
            with _naming(f"{name}: buffers {i}"):
                dtype, target, source = two_sides(sides, out, given, caller.size, caller.rank, 0)
            numel = (source if sides.out_blocks else target)[0][1]
            pieces.append(_Piece(dtype, numel, target, source))
        _check_apart(name, pieces, _block_counts(collective, caller.size))
        return self._run(collective, pieces, (outs, givens), options, op, 0)

    def _run(
        self, collective: str, pieces: list[_Piece], keep: Any, options: Options, op: Op, root: int
    ) -> Work | None:
        caller = self._caller
        batches = []
        for batch in _batches(pieces):  # whatever is wrong with the operation is said before the first runs
            dtype, numel = batch[0].dtype, sum(piece.numel for piece in batch)
            prepared = caller.prepare(
                collective, options.algorithm, dtype, numel, op, root, options.reproducible
            )
            batches.append((prepared, numel, batch))
        counts = _block_counts(collective, caller.size)
        work: Work | None = DoneWork() if options.async_op else None
        for prepared, numel, batch in batches:
            together = len(batch) > 1
            out, given = batch[0].out, batch[0].given
            if together:
                item = ITEMSIZES[batch[0].dtype]
                out = _by_block([piece.out for piece in batch], counts[0], item)
                given = _by_block([piece.given for piece in batch], counts[1], item)
            work = caller.run(prepared, keep, options, numel, out, given, op, together=together)
        return work  # of the last: they end in order


def _batches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """What travels together: small buffers of one dtype, up to a limit. The same on every rank."""
    for (large, _), some in groupby(sorted(pieces, key=_order), key=_order):
        batch: list[_Piece] = []
        nbytes = 0
        for piece in some:
            if batch and (large or nbytes + piece.nbytes > PACKED_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += piece.nbytes
        yield batch


def _order(piece: _Piece) -> tuple[bool, int]:
    """Small ones before large ones, and dtype by dtype; otherwise in the order given."""
    return piece.nbytes > TOGETHER_BYTES, piece.dtype


def _block_counts(collective: str, size: int) -> tuple[int, int]:
    """How many blocks the output and the input have."""
    sides = SIDES.get(collective)
    if sides is None:
        return 1, 0
    return (size if sides.out_blocks else 1), (size if sides.given_blocks else 1)


def _by_block(sides: list[Extents], count: int, item: int) -> Extents:
    """Block 0 of every buffer, then block 1 of every buffer ...: what the engine cuts into `count`."""
    cut = [_cut(side, count, item) for side in sides]
    return [blocks[number] for number in range(count) for blocks in cut]


def _cut(side: Extents, count: int, item: int) -> Extents:
    return spread(side, count, item) if count else []


@contextmanager
def _naming(call: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise named(call, error) from None


def _check_apart(call: str, pieces: list[_Piece], counts: tuple[int, int]) -> None:
    """What is written shares no memory with anything else of the call, but for a buffer's own block."""
    reaches: list[tuple[int, int, bool]] = []  # (start, end, written)
    for piece in pieces:
        item = ITEMSIZES[piece.dtype]
        written, read = _cut(piece.out, counts[0], item), _cut(piece.given, counts[1], item)
        reaches += [(start, start + numel * item, True) for start, numel in written if numel]
        reaches += [(block[0], block[0] + block[1] * item, False) for block in read if block not in written]
    written_to = read_to = 0
    for start, end, writes in sorted(reaches):
        if end > start and (start < written_to or (writes and start < read_to)):
            raise ValueError(f"{call}: two of its buffers overlap in memory")
        written_to, read_to = (max(written_to, end), read_to) if writes else (written_to, max(read_to, end))
