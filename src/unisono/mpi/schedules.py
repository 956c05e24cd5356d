"""Collectives as schedules of messages, see progress.py: what the engine has no collective for.

A reduction keeps the order of ranks: only neighbours in that order are combined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi.lane import Lane, copy_block
from unisono.mpi.message_spec import EMPTY, Block
from unisono.mpi.op import Op, fold
from unisono.mpi.progress import Schedule


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
    """A binomial tree; `data` is bytes, as many on every rank."""
    below = (lane.rank - root) % lane.size
    step = 1
    while step < lane.size and not below & step:
        step *= 2
    if below:
        yield [lane.receive((lane.rank - step) % lane.size, data)]
    sends = []
    while step > 1:
        step //= 2
        if below + step < lane.size:
            sends.append(lane.send((lane.rank + step) % lane.size, data))
    yield sends


def broadcast_block(lane: Lane, block: Block, root: int) -> Schedule:
    """`broadcast` of items."""
    data = block.pack() if lane.rank == root else block.room()
    yield from broadcast(lane, data, root)
    if lane.rank != root:
        block.fill(data)


def gather(lane: Lane, mine: Block | None, blocks: list[Block] | None, root: int) -> Schedule:
    """Every rank sends to the root. mine: None: it is in place."""
    if blocks is None:
        assert mine is not None
        yield [lane.send_block(root, mine)]
        return
    waits = [lane.receive_block(rank, block) for rank, block in enumerate(blocks) if rank != root]
    if mine is not None:
        copy_block(mine, blocks[root])
    yield waits


def scatter(lane: Lane, blocks: list[Block] | None, mine: Block | None, root: int) -> Schedule:
    """The root sends to every rank."""
    if blocks is None:
        assert mine is not None
        yield [lane.receive_block(root, mine)]
        return
    waits = [lane.send_block(rank, block) for rank, block in enumerate(blocks) if rank != root]
    if mine is not None:
        copy_block(blocks[root], mine)
    yield waits


def exchange(
    lane: Lane, outgoing: list[tuple[int, Block]], incoming: list[tuple[int, Block]], self_rank: int = -1
) -> Schedule:
    """Send and receive blocks; those of this rank itself are copied."""
    waits = [lane.receive_block(rank, block) for rank, block in incoming if rank != self_rank]
    waits += [lane.send_block(rank, block) for rank, block in outgoing if rank != self_rank]
    own = [[block for rank, block in side if rank == self_rank] for side in (outgoing, incoming)]
    for source, target in zip(*own, strict=True):
        copy_block(source, target)
    yield waits


def all_to_all(lane: Lane, outgoing: list[Block] | None, incoming: list[Block]) -> Schedule:
    """Block i goes to rank i, in the order of distance. None: the blocks are exchanged in place."""
    order = [(lane.rank + shift) % lane.size for shift in range(lane.size)]
    if outgoing is None:
        outgoing = [_copied(block) for block in incoming]
        outgoing[lane.rank] = incoming[lane.rank]
    yield from exchange(
        lane,
        [(rank, outgoing[rank]) for rank in order],
        [(rank, incoming[rank]) for rank in order],
        lane.rank,
    )


def _copied(block: Block) -> Block:
    packed = np.array(block.pack(), copy=True)
    return Block(packed, 0, packed.size, EMPTY.type)


def all_gather(lane: Lane, mine: Block | None, blocks: list[Block]) -> Schedule:
    """Every rank sends its block to all."""
    own = blocks[lane.rank] if mine is None else mine
    order = [(lane.rank + shift) % lane.size for shift in range(lane.size)]
    packed = own.pack()
    waits = [lane.receive_block(rank, blocks[rank]) for rank in order if rank != lane.rank]
    waits += [lane.send(rank, packed) for rank in order if rank != lane.rank]
    if mine is not None:
        copy_block(mine, blocks[lane.rank])
    yield waits


def reduce(lane: Lane, packed: Any, op: Op, kind: Any, root: int) -> Schedule:
    """A binomial tree. packed: this rank's items, a copy. Returns the result on the root.

    An operation that does not commute is reduced to rank 0, which sends the result to the root.
    """
    top = root if op.Is_commutative() else 0
    below = (lane.rank - top) % lane.size
    step = 1
    while step < lane.size:
        if below & step:
            yield [lane.send((below - step + top) % lane.size, packed)]
            break
        if below + step < lane.size:
            other = np.empty_like(packed)
            yield [lane.receive((below + step + top) % lane.size, other)]
            fold(op, packed, other, kind)
            packed = other
        step *= 2
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


def scan(lane: Lane, packed: Any, op: Op, kind: Any, inclusive: bool) -> Schedule:
    """Recursive doubling over the ranks before this one. Returns None on rank 0 of an exclusive scan.

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
    return packed if inclusive else before
