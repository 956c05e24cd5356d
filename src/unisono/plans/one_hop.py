"""Algorithms for several hosts in which a value crosses only one edge between hosts.

So these edges can carry codes, see `coded`. An encoded value comes from its own rank or is a host's sum. It
goes to the rank that computes the sum, or to one rank of each host, which forwards it.

Source: see `hierarchical`; within hosts and between hosts these are the direct algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.plans.hierarchical import (
    HostPosition,
    all_reduce_in_pieces,
    broadcast_along,
    carrier,
    reduce_along,
)
from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, Tmp, exchange


def star(place: int, count: int) -> Sequence[int]:
    """A flat tree: all hosts below the first."""
    return range(1, count) if place == 0 else ()


PIECES = 8
"""The number of pieces: while one is summed and encoded, the next one is sent."""


def all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """`all_reduce` in pieces: the contributions to one are sent before the result of the previous one."""
    return all_reduce_in_pieces(rank, hosts, PIECES)


def broadcast(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """From the root to every other host, and in each host to all its ranks."""
    return broadcast_along(rank, hosts, root, star)


def reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Every host reduces its ranks and sends the sum to the root."""
    return reduce_along(rank, hosts, root, star)


def all_gather(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends its block to one rank of each other host, which forwards it.

    Every link carries every block of the other hosts once in, and its own once out to each of them.
    """
    here = HostPosition(rank, hosts)

    def at(ranks: tuple[int, ...], block: int) -> int:
        return carrier(ranks, block, next(each for each in here.hosts if block in each))

    away = here.hosts[here.place + 1 :] + here.hosts[: here.place]
    foreign = [block for ranks in away for block in ranks]
    mine = [block for block in foreign if at(here.ranks, block) == rank]
    yield Copy(Out(rank), In(0))
    yield from exchange(
        rank,
        [Send(Out(rank), to=tuple(at(ranks, rank) for ranks in away)), Send(Out(rank), to=here.local_peers)],
        [
            *(Recv(Out(peer), frm=peer) for peer in here.local_peers),
            *(Recv(Out(block), frm=block) for block in mine),
        ],
    )
    yield from exchange(
        rank,
        [Send(Out(block), to=here.local_peers) for block in mine],
        [Recv(Out(block), frm=at(here.ranks, block)) for block in foreign if block not in mine],
    )


def reduce_scatter(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every host reduces the blocks of its ranks and sends each sum to the block's rank, which adds them.

    Every link carries every block of the other hosts once out, and its own once in from each of them.
    """
    here = HostPosition(rank, hosts)
    away = here.hosts[here.place + 1 :] + here.hosts[: here.place]
    at = {block: carrier(here.ranks, block, ranks) for ranks in away for block in ranks}
    mine = [block for block in at if at[block] == rank]
    held = Tmp if here.local_peers else In
    if here.local_peers:
        yield from exchange(
            rank,
            [Send(In(block), to=(peer,)) for peer in here.local_peers for block in at if at[block] == peer],
            [Reduce(Tmp(block), frm=here.ranks, own=In(block)) for block in mine],
        )
    theirs = tuple(carrier(ranks, rank, here.ranks) for ranks in away)
    yield from exchange(
        rank,
        [
            *(Send(held(block), to=(block,)) for block in mine),
            *(Send(In(peer), to=(peer,)) for peer in here.local_peers),
        ],
        [Reduce(Out(0), frm=(*here.ranks, *theirs), own=In(rank))],
    )
