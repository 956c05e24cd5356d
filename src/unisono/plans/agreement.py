"""Some ranks wait until all have made a call; the other ranks only report theirs.

Source: a gather to the first waiting rank and a broadcast from it, both flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.plans.plan import Out, Recv, Send, Step, others


def agreement(rank: int, size: int, waiting: Sequence[int]) -> Iterator[Step]:
    """Every rank notifies the first of `waiting`, which then notifies the rest. Messages are empty.

    Cost: p-1 messages in, len(waiting)-1 out. A rank that does not wait sends one and continues.
    Example (size=3, waiting=(2, 0)): 0 and 1 send to 2; 2 receives both, then sends to 0; 0 receives.
    """
    first, *rest = waiting
    if rank == first:
        for peer in others(rank, size):
            yield Recv(Out(0), frm=peer)
        yield Send(Out(0), to=tuple(rest))
        return
    yield Send(Out(0), to=(first,))
    if rank in rest:
        yield Recv(Out(0), frm=first)
