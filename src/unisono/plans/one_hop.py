"""Algorithms for several hosts in which no value passes more than one edge between them.

So edges between hosts can carry codes, see `coded`: what is encoded comes from the rank that had the value,
or from its host's sum, and goes to the rank that adds it up, or to one rank of each host, which hands it on.

Source: as `hierarchical`; within each host and between hosts these are the direct algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.plans.hierarchical import Here, all_reduce_in_pieces, broadcast_along, carrier, reduce_along
from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, Tmp, exchange

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


def star(place: int, count: int) -> Sequence[int]:
    """All hosts below the first."""
    return range(1, count) if place == 0 else ()


PIECES = 8
"""While one is added up and encoded, the next is on its way."""


def all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """As `all_reduce`, in pieces: the contributions to one leave before the result of the one before."""
    return all_reduce_in_pieces(rank, hosts, PIECES)


def broadcast(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """From the root to every other host, in each of them to all its ranks."""
    return broadcast_along(rank, hosts, root, star)


def reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Every host adds its ranks and sends that to the root."""
    return reduce_along(rank, hosts, root, star)


def all_gather(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends its block to one rank of each other host, which hands it on.

    Every link carries every block of the other hosts once in, and its own once out to each of them.
    """
    here = Here(rank, hosts)

    def at(ranks: tuple[int, ...], block: int) -> int:
        return carrier(ranks, block, next(each for each in here.hosts if block in each))

    away = here.hosts[here.place + 1 :] + here.hosts[: here.place]
    foreign = [block for ranks in away for block in ranks]
    mine = [block for block in foreign if at(here.ranks, block) == rank]
    yield Copy(Out(rank), In(0))
    yield from exchange(
        rank,
        [Send(Out(rank), to=tuple(at(ranks, rank) for ranks in away)), Send(Out(rank), to=here.near)],
        [
            *(Recv(Out(peer), frm=peer) for peer in here.near),
            *(Recv(Out(block), frm=block) for block in mine),
        ],
    )
    yield from exchange(
        rank,
        [Send(Out(block), to=here.near) for block in mine],
        [Recv(Out(block), frm=at(here.ranks, block)) for block in foreign if block not in mine],
    )


def reduce_scatter(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every host adds its ranks' blocks and sends each to the rank it is for, which adds them up.

    Every link carries every block of the other hosts once out, and its own once in from each of them.
    """
    here = Here(rank, hosts)
    away = here.hosts[here.place + 1 :] + here.hosts[: here.place]
    at = {block: carrier(here.ranks, block, ranks) for ranks in away for block in ranks}
    mine = [block for block in at if at[block] == rank]
    held = Tmp if here.near else In
    if here.near:
        yield from exchange(
            rank,
            [Send(In(block), to=(peer,)) for peer in here.near for block in at if at[block] == peer],
            [Reduce(Tmp(block), frm=here.ranks, own=In(block)) for block in mine],
        )
    theirs = tuple(carrier(ranks, rank, here.ranks) for ranks in away)
    yield from exchange(
        rank,
        [
            *(Send(held(block), to=(block,)) for block in mine),
            *(Send(In(peer), to=(peer,)) for peer in here.near),
        ],
        [Reduce(Out(0), frm=(*here.ranks, *theirs), own=In(rank))],
    )
