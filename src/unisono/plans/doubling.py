"""Recursive doubling: in round k ranks at distance 2^k exchange all their data, which then doubles.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), section 4; `bruck`: Bruck, Ho, Kipnis, Upfal, Weathersby,
"Efficient algorithms for all-to-all communications in multiport message-passing systems",
IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, exchange, others

__all__ = ["PowerOfTwoFold", "all_gather", "all_reduce", "bruck"]


class PowerOfTwoFold:
    """Maps any number of ranks to a power of two: each of the first few places has two ranks.

    The first rank of a place works. The second one, its `extra`, sends its data to it and receives the
    result.

    Example (size=6): 4 places, of ranks 0 and 1, 2 and 3, 4, 5. Fold(3, 6) is place 1, an extra of rank 2.

    Attributes:
        places: how many.  place: of this rank.  partner: the other rank of the place, or None.
        is_extra: whether this rank is the second one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.places = 1 << (size.bit_length() - 1)
        self.shared = size - self.places
        self.place = rank // 2 if rank < 2 * self.shared else rank - self.shared
        ranks = self.ranks(self.place, self.place + 1)
        self.is_extra = rank != ranks[0]
        self.partner = ranks[not self.is_extra] if len(ranks) == 2 else None

    def worker(self, place: int) -> int:
        """The rank that works at a place."""
        return 2 * place if place < self.shared else place + self.shared

    def ranks(self, first: int, end: int) -> range:
        """All ranks of the places first..end-1."""
        return range(self.worker(first), self.worker(end))


def all_reduce(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Both ranks of a pair combine their buffers: the fewest rounds, for small buffers.

    Cost if p is a power of two: log2(p) (a + b L + g L); other p pay 2(a + b L) more.
    """
    fold = PowerOfTwoFold(rank, size)
    if fold.partner is not None and fold.is_extra:
        yield Send(Out(0), to=(fold.partner,))
        yield Recv(Out(0), frm=fold.partner)
        return
    if fold.partner is not None or size == 1:
        yield Reduce(Out(0), frm=(rank,) if fold.partner is None else (rank, fold.partner))
    for k in range(fold.places.bit_length() - 1):
        peer = fold.worker(fold.place ^ (1 << k))
        yield Send(Out(0), to=(peer,))
        yield Reduce(Out(0), frm=(min(rank, peer), max(rank, peer)))
    if fold.partner is not None:
        yield Send(Out(0), to=(fold.partner,))


def all_gather(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """On the hypercube: in round k exchange 2^k blocks with the rank at distance 2^k.

    Cost if p is a power of two: log2(p) a + (p-1)/p b L; other p pay two more rounds.
    """
    fold = PowerOfTwoFold(rank, size)
    if fold.partner is not None and fold.is_extra:
        yield Send(In(0), to=(fold.partner,))
        yield Copy(Out(rank), In(0))
        yield from (Recv(Out(block), frm=fold.partner) for block in sorted(others(rank, size)))
        return
    yield Copy(Out(rank), In(0))
    if fold.partner is not None:
        yield Recv(Out(fold.partner), frm=fold.partner)
    for k in range(fold.places.bit_length() - 1):
        reach = 1 << k
        mine = fold.place & -reach
        theirs, peer = mine ^ reach, fold.worker(fold.place ^ reach)
        yield from exchange(
            rank,
            [Send(Out(block), to=(peer,)) for block in fold.ranks(mine, mine + reach)],
            [Recv(Out(block), frm=peer) for block in fold.ranks(theirs, theirs + reach)],
        )
    if fold.partner is not None:
        yield from (Send(Out(b), to=(fold.partner,)) for b in range(size) if b != fold.partner)


def bruck(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """In round k send all blocks so far to the rank 2^k to the left; for any number of ranks.

    Cost: ceil(log2 p) rounds and (p-1)/p * nbytes of the whole result sent per rank.

        p=3     round 0        round 1
        rank 0  0 -> rank 2    0 -> rank 1
        rank 1  1 -> rank 0    1 -> rank 2
        rank 2  2 -> rank 1    2 -> rank 0
    """
    yield Copy(Out(rank), In(0))
    for k in range((size - 1).bit_length()):
        reach = 1 << k
        blocks = range(min(reach, size - reach))
        left, right = (rank - reach) % size, (rank + reach) % size
        yield from exchange(
            rank,
            [Send(Out((rank + i) % size), to=(left,)) for i in blocks],
            [Recv(Out((right + i) % size), frm=right) for i in blocks],
        )
