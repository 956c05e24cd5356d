"""Many buffers in one call: small ones are packed, large ones run one after another.

The result is that of the collective on each buffer. Small buffers of one dtype are packed into one, and take
one operation; only its size decides whether a buffer is small. All are checked before the first byte moves.
Ranks compare their lists: other sizes, other dtypes or another order is a `Mismatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import _native
from unisono.engine.base.checking import listed
from unisono.engine.diagnosis.calls import number_of_list
from unisono.engine.group.layout import SIDES, Extents, named, spread, two_sides
from unisono.engine.group.work import DoneWork
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, pinned, view
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import Op, PremulSum

if TYPE_CHECKING:
    from unisono.engine.group.planning import Planner

__all__ = ["no_calls", "plan"]

TOGETHER_BYTES = 64 * 1024
"""Copying a buffer of up to this size twice takes less time than an operation of its own."""
PACKED_BYTES = 1 << 20
"""The most bytes that are packed into one buffer."""
Coding = tuple[Any, Any]

LISTED = 8
"""The most buffers that an error lists."""


class _Piece(NamedTuple):
    """One buffer of a call, or an output and its input.

    Attributes:
        place: in the caller's list.  numel: the elements that a rank contributes.
    """

    place: int
    dtype: int
    numel: int
    out: Extents
    given: Extents

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


def plan(
    planner: Planner,
    kind: str,
    outs: Sequence[Any],
    givens: Sequence[Any] | None,
    op: Op,
    root: int,
    reproducible: bool,
    coding: Coding,
) -> Any:
    """The bound calls of a coalesced call, all checked; or a callable that runs it, see `Calls._execute`.

    Args:
        outs, givens: its lists of buffers.  coding: codec, between_hosts.
    Raises:
        ValueError, TypeError: an argument is wrong.  GroupClosed: the group was closed.
    """
    collective = kind_of(kind).plan
    if collective in SIDES:
        pieces, keep = _between(planner, kind, outs, givens)
        _check_apart(kind, pieces, _block_counts(collective, planner.size))
        return _bind(planner, kind, pieces, keep, True, op, root, reproducible, coding)
    writes = collective != "broadcast" or planner.rank != root or coding[0] is not None
    pieces, keep = _in_place(planner, kind, outs, writes)
    if writes:
        _check_apart(kind, pieces, (1, 0))
    return _bind(planner, kind, pieces, keep, writes, op, root, reproducible, coding)


def no_calls(later: bool, timeout: Any) -> DoneWork | None:  # noqa: ARG001
    """The call for a list without buffers."""
    return DoneWork() if later else None


def _in_place(planner: Planner, kind: str, xs: Sequence[Any], writable: bool) -> tuple[list[_Piece], Any]:
    pieces = []
    xs = [planner.seen(kind, x) for x in listed(xs, f"{kind}: xs")]
    keep = pinned(xs)
    for place, x in enumerate(xs):
        with _naming(kind):
            address, numel, dtype = view(x, writable, f"xs[{place}]")
        pieces.append(_Piece(place, dtype, numel, [(address, numel)], []))
    return pieces, keep


def _between(planner: Planner, kind: str, outs: Sequence[Any], givens: Any) -> tuple[list[_Piece], Any]:
    sides = SIDES[kind_of(kind).plan]
    outs, givens = listed(outs, f"{kind}: outs"), listed(givens, f"{kind}: inputs")
    outs, givens = ([planner.seen(kind, x) for x in side] for side in (outs, givens))
    if len(outs) != len(givens):
        raise ValueError(f"{kind}: {len(outs)} outputs and {len(givens)} inputs, expected as many")
    keep = [pinned(each) for each in (*outs, *givens)]
    pieces = []
    for place, (out, given) in enumerate(zip(outs, givens, strict=True)):
        with _naming(f"{kind}: buffers {place}"):
            dtype, target, source = two_sides(sides, out, given, planner.size, planner.rank, 0)
        numel = (source if sides.out_blocks else target)[0][1]
        pieces.append(_Piece(place, dtype, numel, target, source))
    return pieces, keep


def _bind(
    planner: Planner,
    kind: str,
    pieces: list[_Piece],
    keep: Any,
    writes: bool,
    op: Op,
    root: int,
    reproducible: bool,
    coding: Coding,
) -> Any:
    in_order = reproducible or planner.reproducible
    collective, coded = kind_of(kind).plan, None
    if any(each is not None for each in coding):
        for piece in pieces:  # the same for all; the values of each are checked
            sides = piece.out, piece.given
            coded = planner.codings.coded(kind, coding, piece.dtype, op, root, in_order, sides)
    own = planner.own_list(collective, pieces, keep, op, root, reproducible)
    if own is not None:
        return own
    number = number_of_list([(piece.dtype, piece.numel) for piece in pieces])
    blocks = _block_counts(collective, planner.size)
    factor = op.factor if isinstance(op, PremulSum) else 1.0
    note = _listed(pieces)
    calls = []
    for batch in _batches(pieces):
        dtype, numel = batch[0].dtype, sum(piece.numel for piece in batch)
        operation, name, root, _ = planner.prepare(kind, None, dtype, numel, op, root, reproducible, coded)
        item = ITEMSIZES[dtype]
        calls.append(
            _native.BoundCall(
                name,
                operation,
                root,
                number,
                factor,
                _joined([piece.out for piece in batch], blocks[0], item),
                _joined([piece.given for piece in batch], blocks[1], item),
                keep,
                writes=writes,
                pieces=[piece.place for piece in batch],
                blocks=blocks,
                note=note,
            )
        )
    return calls or no_calls


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


def _joined(sides: list[Extents], blocks: int, item: int) -> Extents:
    """The extents of all buffers: one for each, or one for each block if a buffer is a list of blocks."""
    if all(len(side) <= 1 for side in sides):
        return [extent for side in sides for extent in side]
    return [extent for side in sides for extent in _cut(side, blocks, item)]


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
