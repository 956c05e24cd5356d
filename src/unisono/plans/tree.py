"""Binomial trees: ceil(log2 p) rounds, in each of which the number of ranks with data doubles.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, Tmp


def children(place: int, size: int) -> list[int]:
    """The children of `place` in the tree over places 0..size-1, nearest first.

    A place's children are at distance 1, 2, 4 ... below its lowest set bit.
    Example (size=8): children(0) == [1, 2, 4], children(4) == [5, 6], children(6) == [7]
    """
    reach = place & -place if place else size
    distances = [1 << k for k in range(size.bit_length()) if 1 << k < reach]
    return [place + distance for distance in distances if place + distance < size]


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Down the tree, from the root. Cost: ceil(log2 p) rounds, nbytes each."""
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


def gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Up the tree: a rank forwards all blocks of its subtree at once. All blocks are equally long.

    Cost: ceil(log2 p) rounds; the root receives (p-1)/p of the whole.
    """
    place = (rank - root) % size
    held = Out if place == 0 else Tmp
    if place == 0:
        yield Copy(Out(rank), In(0))
    for child in children(place, size):
        for below in _subtree(child, size):
            block = (below + root) % size
            yield Recv(held(block), frm=(child + root) % size)
    if place:
        above = ((place - (place & -place) + root) % size,)
        yield Send(In(0), to=above)
        for below in _subtree(place, size)[1:]:
            yield Send(Tmp((below + root) % size), to=above)


def scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """Down the tree: a rank receives all blocks of its subtree at once. All blocks are equally long.

    Cost: ceil(log2 p) rounds; the root sends (p-1)/p of the whole.
    """
    place = (rank - root) % size
    for below in _subtree(place, size) if place else ():
        block = (below + root) % size
        target = Out(0) if below == place else Tmp(block)
        yield Recv(target, frm=(place - (place & -place) + root) % size)
    for child in reversed(children(place, size)):
        for below in _subtree(child, size):
            block = (below + root) % size
            yield Send(Tmp(block) if place else In(block), to=((child + root) % size,))
    if place == 0:
        yield Copy(Out(0), In(rank))


def gather_broadcast(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """All-gather: gather to rank 0, then broadcast the whole. Cost: 2 ceil(log2 p) rounds."""
    for step in gather(rank, size, 0):  # blocks that are forwarded on the way up come back on the way down
        if isinstance(step, Recv):
            yield Recv(Out(step.chunk.index), frm=step.frm)
        elif isinstance(step, Send) and step.chunk.space == "tmp":
            yield Send(Out(step.chunk.index), to=step.to)
        else:
            yield step
    if rank:
        yield from (Recv(Out(block), frm=rank - (rank & -rank)) for block in range(size))
    for child in reversed(children(rank, size)):
        yield from (Send(Out(block), to=(child,)) for block in range(size))


def _subtree(place: int, size: int) -> range:
    """The places of the subtree of `place`, itself first. Example (size=7): 4, 5, 6 for place 4."""
    reach = place & -place if place else size
    return range(place, min(place + reach, size))
