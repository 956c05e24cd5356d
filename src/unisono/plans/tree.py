"""Binomial trees: ceil(log2 p) rounds, in each of which the ranks that have something double.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Out, Recv, Reduce, Send, Step, Tmp

__all__ = ["all_reduce", "broadcast", "reduce"]


def children(place: int, size: int) -> list[int]:
    """Places below `place` in the tree over places 0..size-1, nearest first.

    A place's children are at distance 1, 2, 4 ... below its lowest set bit.
    Example (size=8): children(0) == [1, 2, 4], children(4) == [5, 6], children(6) == [7]
    """
    reach = place & -place if place else size
    distances = [1 << k for k in range(size.bit_length()) if 1 << k < reach]
    return [place + distance for distance in distances if place + distance < size]


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """From the root down. Cost: ceil(log2 p) rounds, nbytes each."""
    place = (rank - root) % size
    if place:
        yield Recv(Out(0), frm=(place - (place & -place) + root) % size)
    for child in reversed(children(place, size)):
        yield Send(Out(0), to=((child + root) % size,))


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """From the leaves up to the root, over scratch memory: only the root's buffer changes.

    Cost: ceil(log2 p) rounds, nbytes each.
    """
    place = (rank - root) % size
    below = children(place, size)
    result = Tmp(0) if place else Out(0)
    for number, child in enumerate(below):
        own = Out(0) if number == 0 else result
        yield Reduce(result, frm=(rank, (child + root) % size), own=own)
    if not below and size == 1:
        yield Reduce(Out(0), frm=(rank,))
    if place:
        yield Send(result if below else Out(0), to=((place - (place & -place) + root) % size,))


def all_reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast. Cost: 2 ceil(log2 p) rounds, nbytes each."""
    yield from reduce(rank, size, root)
    yield from broadcast(rank, size, root)
