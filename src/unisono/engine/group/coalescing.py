"""Many buffers in one call: small ones are packed, large ones run one after another.

The result is that of the collective on each buffer. Small buffers of one dtype are packed into one, and take
one operation; only its size decides whether a buffer is small. All are checked before the first byte moves.
Ranks compare their lists: other sizes, other dtypes or another order is a `Mismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

from unisono.engine.base.validation import listed
from unisono.engine.group.buffer_layout import SIDES, Extents, both_buffers, spread, with_call_name
from unisono.engine.group.work import CompletedWork
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, pinned, view
from unisono.engine.memory.strided import Unpacking, is_strided, pack
from unisono.engine.operations.kinds import kind_of

TOGETHER_BYTES = 64 * 1024
"""Copying a buffer of up to this size twice takes less time than an operation of its own."""
PACKED_BYTES = 1 << 20
"""The most bytes that are packed into one buffer."""

LISTED = 8
"""The most buffers that an error lists."""


class CoalescedBuffer(NamedTuple):
    """One buffer of a call, or an output and its input.

    Attributes:
        place: in the caller's list.  numel: the elements that a rank contributes.
    """

    place: int
    dtype: int
    numel: int
    out: Extents
    sendbuf: Extents

    @property
    def nbytes(self) -> int:
        """That a rank contributes."""
        return self.numel * ITEMSIZES[self.dtype]


class CoalescedBuffers(NamedTuple):
    """The checked buffers of a call. keep: pins them.  writes: this rank's first side is written.

    unpack: writes packed outputs back, see `strided`.
    """

    each: list[CoalescedBuffer]
    keep: Any
    writes: bool
    unpack: Unpacking | None = None


def check_buffers(
    kind: str,
    outs: Any,
    sendbufs: Any,
    size: int,
    rank: int,
    root: int,
    codec: Any,
    as_readable: Callable[[str, Any], Any],
) -> CoalescedBuffers:
    """The buffers of a coalesced call, all checked.

    Args:
        outs, sendbufs: its lists of buffers.  as_readable: see `Planner.as_readable`.
    Raises:
        ValueError, TypeError: a buffer is wrong, or two share memory.
    """
    collective = kind_of(kind).plan
    if collective in SIDES:
        unpacking = Unpacking()
        pieces, keep = _between(kind, outs, sendbufs, size, rank, as_readable, unpacking)
        _check_apart(kind, pieces, block_counts(collective, size))
        return CoalescedBuffers(pieces, keep, True, unpacking or None)
    writes = collective != "broadcast" or rank != root or codec is not None
    unpacking = Unpacking()
    pieces, keep = _in_place(kind, outs, writes, as_readable, unpacking)
    if writes:
        _check_apart(kind, pieces, (1, 0))
    return CoalescedBuffers(pieces, keep, writes, unpacking or None)


def no_calls(later: bool, timeout: Any) -> CompletedWork | None:  # noqa: ARG001
    """The call for a list without buffers."""
    return CompletedWork() if later else None


def _in_place(
    kind: str, xs: Any, writable: bool, as_readable: Callable[[str, Any], Any], unpacking: Unpacking
) -> tuple[list[CoalescedBuffer], Any]:
    pieces = []
    xs = [as_readable(kind, x) for x in listed(xs, f"{kind}: xs")]
    if is_strided(xs):
        with _naming(kind):
            xs = pack(xs, unpacking if writable else None, "xs")
    keep = pinned(xs)
    for place, x in enumerate(xs):
        with _naming(kind):
            address, numel, dtype = view(x, writable, f"xs[{place}]")
        pieces.append(CoalescedBuffer(place, dtype, numel, [(address, numel)], []))
    return pieces, keep


def _between(
    kind: str,
    outs: Any,
    sendbufs: Any,
    size: int,
    rank: int,
    as_readable: Callable[[str, Any], Any],
    unpacking: Unpacking,
) -> tuple[list[CoalescedBuffer], Any]:
    sides = SIDES[kind_of(kind).plan]
    outs, sendbufs = listed(outs, f"{kind}: outs"), listed(sendbufs, f"{kind}: inputs")
    outs, sendbufs = ([as_readable(kind, x) for x in side] for side in (outs, sendbufs))
    if len(outs) != len(sendbufs):
        raise ValueError(f"{kind}: {len(outs)} outputs and {len(sendbufs)} inputs, expected as many")
    if is_strided(outs) or is_strided(sendbufs):
        with _naming(kind):
            outs, sendbufs = pack(outs, unpacking, "outs", read=False), pack(sendbufs, None, "inputs")
    keep = [pinned(each) for each in (*outs, *sendbufs)]
    pieces = []
    for place, (out, sendbuf) in enumerate(zip(outs, sendbufs, strict=True)):
        with _naming(f"{kind}: buffers {place}"):
            dtype, target, source = both_buffers(sides, out, sendbuf, size, rank, 0)
        numel = (source if sides.out_blocks else target)[0][1]
        pieces.append(CoalescedBuffer(place, dtype, numel, target, source))
    return pieces, keep


def batches(pieces: list[CoalescedBuffer]) -> Iterator[list[CoalescedBuffer]]:
    """The buffers that are packed together: small, of one dtype, up to a limit. The same on every rank."""
    for (large, _), some in groupby(sorted(pieces, key=_order), key=_order):
        batch: list[CoalescedBuffer] = []
        nbytes = 0
        for piece in some:
            if batch and (large or nbytes + piece.nbytes > PACKED_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += piece.nbytes
        yield batch


def describe(pieces: list[CoalescedBuffer]) -> str:
    """The list of buffers, for a Mismatch."""
    each = [f"{DTYPES[piece.dtype]}[{piece.numel}]" for piece in pieces[:LISTED]]
    return ", ".join([*each, "..."] if len(pieces) > LISTED else each)


def _order(piece: CoalescedBuffer) -> tuple[bool, int]:
    """The sort key: small buffers before large ones, then by dtype. The sort is stable."""
    return piece.nbytes > TOGETHER_BYTES, piece.dtype


def block_counts(collective: str, size: int) -> tuple[int, int]:
    """How many blocks the output and the input have."""
    sides = SIDES.get(collective)
    if sides is None:
        return 1, 0
    return (size if sides.out_blocks else 1), (size if sides.sendbuf_blocks else 1)


def extents_of(sides: list[Extents], blocks: int, item: int) -> Extents:
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
        raise with_call_name(call, error) from None


def _check_apart(call: str, pieces: list[CoalescedBuffer], counts: tuple[int, int]) -> None:
    """Check that no written memory is shared with another buffer, except a buffer's own block."""
    reaches: list[tuple[int, int, bool]] = []  # (start, end, written)
    for piece in pieces:
        item = ITEMSIZES[piece.dtype]
        written, read = _cut(piece.out, counts[0], item), _cut(piece.sendbuf, counts[1], item)
        reaches += [(start, start + numel * item, True) for start, numel in written if numel]
        reaches += [(block[0], block[0] + block[1] * item, False) for block in read if block not in written]
    written_to = read_to = 0
    for start, end, writes in sorted(reaches):
        if end > start and (start < written_to or (writes and start < read_to)):
            raise ValueError(f"{call}: two of its buffers overlap in memory")
        written_to, read_to = (max(written_to, end), read_to) if writes else (written_to, max(read_to, end))
