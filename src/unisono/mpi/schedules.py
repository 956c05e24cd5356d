"""Collectives as schedules of messages, see progress.py: what the engine has no collective for.

A reduction keeps the order of ranks: only neighbours in that order are combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unisono.mpi.message_spec import Block, byte_block
from unisono.mpi.op import Op, fold
from unisono.mpi.progress import Schedule
from unisono.mpi.transport import Lane, copy_block


def barrier(lane: Lane) -> Schedule:
    """Dissemination: in round k rank r tells r + 2**k.

    Source: Hensgen, Finkel, Manber, IJPP 1988.
    """
    step, token = 1, np.zeros(1, np.uint8)
    while step < lane.size:
        room = np.empty(1, np.uint8)
        yield [
            lane.receive((lane.rank - step) % lane.size, room),
            lane.send((lane.rank + step) % lane.size, token),
        ]
        step *= 2


def broadcast(lane: Lane, data: Any, root: int) -> Schedule:
    """Down the tree; `data` is bytes, as many on every rank."""
    parent, children = lane.tree(root)
    if parent is not None:
        yield [lane.receive(parent, data)]
    yield [lane.send(rank, data) for rank in children]


def broadcast_block(lane: Lane, block: Block, root: int) -> Schedule:
    """`broadcast` of items."""
    data = block.pack() if lane.rank == root else block.room()
    yield from broadcast(lane, data, root)
    if lane.rank != root:
        block.fill(data)


def exchange(
    lane: Lane,
    outgoing: Iterable[tuple[int, Block]],
    incoming: Iterable[tuple[int, Block]],
    copies: bool = True,
) -> Schedule:
    """Send and receive blocks, nearest ranks first. copies: not those for this rank itself."""

    def distance(pair: tuple[int, Block]) -> int:
        return (pair[0] - lane.rank) % lane.size

    own = lane.rank if copies and not lane.inter else -1
    gives, takes = sorted(outgoing, key=distance), sorted(incoming, key=distance)
    packed = {id(block): block.pack() for _, block in gives}  # a block may go to many ranks
    waits = [lane.receive_block(rank, block) for rank, block in takes if rank != own]
    waits += [lane.send(rank, packed[id(block)]) for rank, block in gives if rank != own]
    mine = [[block for rank, block in side if rank == own] for side in (gives, takes)]
    for source, target in zip(*mine, strict=False):  # in place they are the same
        if source.raw is not target.raw or (source.start, source.type) != (target.start, target.type):
            copy_block(source, target)
    yield waits


def reduce(lane: Lane, packed: Any, op: Op, kind: Any, root: int) -> Schedule:
    """Up the tree. packed: this rank's items, a copy. Returns the result on the root.

    An operation that does not commute is reduced to rank 0, which sends the result to the root.
    """
    top = root if op.Is_commutative() else 0
    parent, children = lane.tree(top)
    for rank in reversed(children):
        other = np.empty_like(packed)
        yield [lane.receive(rank, other)]
        fold(op, packed, other, kind)
        packed = other
    if parent is not None:
        yield [lane.send(parent, packed)]
    if top != root:
        if lane.rank == top:
            yield [lane.send(root, packed)]
        elif lane.rank == root:
            packed = np.empty_like(packed)
            yield [lane.receive(top, packed)]
    return packed if lane.rank == root else None


def all_reduce(lane: Lane, packed: Any, op: Op, kind: Any) -> Schedule:
    """A reduction to rank 0 and a broadcast, so that every rank gets the same bits."""
    found = yield from reduce(lane, packed, op, kind, 0)
    packed = np.empty_like(packed) if found is None else found
    yield from broadcast(lane, packed, 0)
    return packed


def scan(lane: Lane, packed: Any, op: Op, kind: Any) -> Schedule:
    """The result up to this rank."""
    return (yield from _prefixes(lane, packed, op, kind))[1]


def exscan(lane: Lane, packed: Any, op: Op, kind: Any) -> Schedule:
    """The same up to the rank before; None on rank 0."""
    return (yield from _prefixes(lane, packed, op, kind))[0]


def _prefixes(lane: Lane, packed: Any, op: Op, kind: Any) -> Schedule:
    """Recursive doubling over the ranks before this one.

    Source: Hillis, Steele, CACM 1986.
    """
    before = None  # of the ranks below this one that are known
    step = 1
    while step < lane.size:
        waits = []
        other = np.empty_like(packed)
        if lane.rank + step < lane.size:
            waits.append(lane.send(lane.rank + step, packed.copy()))
        if lane.rank >= step:
            waits.append(lane.receive(lane.rank - step, other))
        yield waits
        if lane.rank >= step:
            if before is None:
                before = other.copy()
            else:
                fold(op, other, before, kind)
            fold(op, other, packed, kind)
        step *= 2
    return before, packed


def scatter_bytes(lane: Lane, whole: Any, sizes: Sequence[int], mine: Any) -> Schedule:
    """Rank 0 gives every rank so many bytes of `whole`."""
    ends = np.cumsum([0, *sizes]).tolist() if lane.rank == 0 else []
    parts = [byte_block(whole, at, end - at) for at, end in pairwise(ends)]
    yield from exchange(lane, enumerate(parts), [(0, byte_block(mine))])
