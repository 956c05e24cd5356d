"""All-to-all in which every rank has one partner at a time, so that no port and no link is overloaded.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Perform. Comput. Appl. 19 (2005), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Copy, In, Out, Recv, Send, Step


def all_to_all(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """In round k exchange blocks with rank XOR k, or send to rank+k and receive from rank-k.

    Cost: p-1 rounds and (p-1)/p * nbytes sent per rank.
    """
    yield Copy(Out(rank), In(rank))
    power_of_two = size & (size - 1) == 0
    for k in range(1, size):
        to = rank ^ k if power_of_two else (rank + k) % size
        frm = rank ^ k if power_of_two else (rank - k) % size
        yield Send(In(to), to=(to,))
        yield Recv(Out(frm), frm=frm)
