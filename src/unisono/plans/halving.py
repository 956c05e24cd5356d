"""Recursive halving: in each round exchange half of the remaining data with a nearer rank, and reduce the
other half.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. Ranks beyond a power
of two are folded into their neighbours first (`doubling.PowerOfTwoFold`).
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.doubling import PowerOfTwoFold
from unisono.plans.plan import In, Out, Recv, Reduce, Send, Step, Tmp, exchange

__all__ = ["all_reduce", "reduce_scatter"]


def all_reduce(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Halve until every place has one chunk complete, then double until every rank has all chunks.

    Cost if p is a power of two: 2 log2(p) a + 2(p-1)/p b L + (p-1)/p g L; other p pay 2(a + b L) + g L more.

        p=4     halving              doubling
        rank 0  2,3 -> 2    1 -> 1   0 -> 1    0,1 -> 2
        rank 1  2,3 -> 3    0 -> 0   1 -> 0    0,1 -> 3
    """
    fold = PowerOfTwoFold(rank, size)
    partner, everything = fold.partner, range(fold.places)
    if partner is not None and fold.is_extra:
        yield from (Send(Out(chunk), to=(partner,)) for chunk in everything)
        yield from (Recv(Out(chunk), frm=partner) for chunk in everything)
        return
    if partner is not None or size == 1:
        own = (rank,) if partner is None else (rank, partner)
        yield from (Reduce(Out(chunk), frm=own) for chunk in everything)
    for peer, keep, give in _halves(fold):
        pair = (min(rank, peer), max(rank, peer))
        yield from exchange(
            rank,
            [Send(Out(chunk), to=(peer,)) for chunk in give],
            [Reduce(Out(chunk), frm=pair) for chunk in keep],
        )
    for peer, have, lack in reversed(list(_halves(fold))):
        yield from exchange(
            rank,
            [Send(Out(chunk), to=(peer,)) for chunk in have],
            [Recv(Out(chunk), frm=peer) for chunk in lack],
        )
    if partner is not None:
        yield from (Send(Out(chunk), to=(partner,)) for chunk in everything)


def reduce_scatter(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Halve until every place has its own block complete.

    Cost if p is a power of two: log2(p) a + (p-1)/p (b + g) L.
    """
    fold = PowerOfTwoFold(rank, size)
    partner = fold.partner
    if partner is not None and fold.is_extra:
        yield from (Send(In(block), to=(partner,)) for block in range(size))
        yield Recv(Out(0), frm=partner)
        return
    held = In
    if partner is not None:
        yield from (Reduce(Tmp(b), frm=(rank, partner), own=In(b)) for b in range(size))
        held = Tmp
    if size == 1:
        yield Reduce(Out(0), frm=(0,), own=In(0))
    for peer, keep, give in _halves(fold):
        last = len(keep) == 1
        pair = (min(rank, peer), max(rank, peer))
        kept = fold.ranks(keep[0], keep[-1] + 1)
        yield from exchange(
            rank,
            [Send(held(b), to=(peer,)) for b in fold.ranks(give[0], give[-1] + 1)],
            [Reduce(Out(0) if last and b == rank else Tmp(b), frm=pair, own=held(b)) for b in kept],
        )
        held = Tmp
    if partner is not None:
        yield Send(Tmp(partner), to=(partner,))


def _halves(fold: PowerOfTwoFold) -> Iterator[tuple[int, range, range]]:
    """(peer, places of the own half, places of the other), the widest first.

    Example (place 1 of 4): (3, 0..1, 2..3), then (0, 1..1, 0..0)
    """
    reach = fold.places // 2
    while reach:
        mine = fold.place & -reach
        other = mine ^ reach
        yield fold.worker(fold.place ^ reach), range(mine, mine + reach), range(other, other + reach)
        reach //= 2
