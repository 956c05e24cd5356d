"""Many buffers in one call: small ones are packed, large ones run one after another.

The result is that of the collective on each buffer. Small buffers of one dtype are packed into one, and take
one operation; only its size decides whether a buffer is small. All are checked before the first byte moves.
Ranks compare their lists: other sizes, other dtypes or another order is a `Mismatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from unisono import _native
from unisono.buffers import DTYPES, ITEMSIZES, pinned, view
from unisono.checking import listed
from unisono.diagnosis.calls import number_of_list
from unisono.group.layout import SIDES, Extents, spread, two_sides
from unisono.group.planning import Planner, named
from unisono.reduction import Op, PremulSum

__all__ = ["between", "in_place"]

TOGETHER_BYTES = 64 * 1024
"""Copying a buffer of up to this size twice takes less time than an operation of its own."""
PACKED_BYTES = 1 << 20
"""The most bytes that are packed into one buffer."""
Coding = tuple[Any, Any]

LISTED = 8
"""The most buffers that an error lists."""


class _Piece(NamedTuple):
    """One buffer of a call, or an output and its input. `numel`: the elements that a rank contributes."""

    dtype: int
    numel: int
    out: Extents
    given: Extents

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


def in_place(
    planner: Planner,
    collective: str,
    xs: Sequence[Any],
    writable: bool,
    op: Op,
    root: int = 0,
    reproducible: bool = False,
    coding: Coding = (None, None),
) -> list[_native.BoundCall]:
    """The bound calls for a collective on each of `xs`, all checked. coding: codec, between_hosts."""
    name = f"{collective}_coalesced"
    pieces = []
    xs = [planner.seen(name, x) for x in listed(xs, f"{name}: xs")]
    keep = pinned(xs)
    for i, x in enumerate(xs):
        with _naming(name):
            address, numel, dtype = view(x, writable, f"xs[{i}]")
        pieces.append(_Piece(dtype, numel, [(address, numel)], []))
    if writable:
        _check_apart(name, pieces, (1, 0))
    return _bind(planner, collective, pieces, keep, op, root, reproducible, coding)


def between(
    planner: Planner,
    collective: str,
    outs: Sequence[Any],
    givens: Sequence[Any],
    op: Op,
    reproducible: bool = False,
    coding: Coding = (None, None),
) -> list[_native.BoundCall]:
    """The bound calls for a collective from each of `givens` into its `outs`, all checked."""
    sides, name = SIDES[collective], f"{collective}_coalesced"
    outs, givens = listed(outs, f"{name}: outs"), listed(givens, f"{name}: inputs")
    outs, givens = ([planner.seen(name, x) for x in side] for side in (outs, givens))
    if len(outs) != len(givens):
        raise ValueError(f"{name}: {len(outs)} outputs and {len(givens)} inputs, expected as many")
    keep = [pinned(each) for each in (*outs, *givens)]
    pieces = []
    for i, (out, given) in enumerate(zip(outs, givens, strict=True)):
        with _naming(f"{name}: buffers {i}"):
            dtype, target, source = two_sides(sides, out, given, planner.size, planner.rank, 0)
        numel = (source if sides.out_blocks else target)[0][1]
        pieces.append(_Piece(dtype, numel, target, source))
    _check_apart(name, pieces, _block_counts(collective, planner.size))
    return _bind(planner, collective, pieces, keep, op, 0, reproducible, coding)


def _bind(
    planner: Planner,
    collective: str,
    pieces: list[_Piece],
    keep: Any,
    op: Op,
    root: int,
    reproducible: bool,
    coding: Coding,
) -> list[_native.BoundCall]:
    in_order = reproducible or planner.reproducible
    coded = [
        planner.codings.coded(
            f"{collective}_coalesced", coding, piece.dtype, op, root, in_order, (piece.out, piece.given)
        )
        for piece in pieces
        if coding != (None, None)
    ]
    own: list[_native.BoundCall] | None = planner.own_list(collective, pieces, keep, op, root, reproducible)
    if own is not None:
        return own
    fingerprint_number = number_of_list([(piece.dtype, piece.numel) for piece in pieces])
    counts = _block_counts(collective, planner.size)
    factor = op.factor if isinstance(op, PremulSum) else 1.0
    note = partial(_listed, pieces)
    calls = []
    for batch in _batches(pieces):
        dtype, numel = batch[0].dtype, sum(piece.numel for piece in batch)
        operation, name, root, _ = planner.prepare(
            f"{collective}_coalesced", None, dtype, numel, op, root, reproducible, coded[0] if coded else None
        )
        together = len(batch) > 1
        out, given = batch[0].out, batch[0].given
        if together:
            item = ITEMSIZES[dtype]
            out = _by_block([piece.out for piece in batch], counts[0], item)
            given = _by_block([piece.given for piece in batch], counts[1], item)
        calls.append(
            _native.BoundCall(
                name,
                operation,
                root,
                fingerprint_number,
                factor,
                out,
                given,
                keep,
                together=together,
                note=note,
            )
        )
    return calls


def _batches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """The buffers that are packed together: small, of one dtype, up to a limit. The same on every rank."""
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


def _listed(pieces: list[_Piece]) -> str:
    """The list of buffers, for a Mismatch."""
    each = [f"{DTYPES[piece.dtype]}[{piece.numel}]" for piece in pieces[:LISTED]]
    return ", ".join([*each, "..."] if len(pieces) > LISTED else each)


def _order(piece: _Piece) -> tuple[bool, int]:
    """The sort key: small buffers before large ones, then by dtype. The sort is stable."""
    return piece.nbytes > TOGETHER_BYTES, piece.dtype


def _block_counts(collective: str, size: int) -> tuple[int, int]:
    """How many blocks the output and the input have."""
    sides = SIDES.get(collective)
    if sides is None:
        return 1, 0
    return (size if sides.out_blocks else 1), (size if sides.given_blocks else 1)


def _by_block(sides: list[Extents], count: int, item: int) -> Extents:
    """Block 0 of every buffer, then block 1 of every buffer, and so on: the engine cuts this into `count`."""
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
    """Check that no written memory is shared with another buffer, except a buffer's own block."""
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
