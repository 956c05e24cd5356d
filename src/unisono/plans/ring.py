"""Ring algorithms: every rank communicates with its two neighbours only, and all links carry equally much.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, Tmp


def all_reduce(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Reduce-scatter around the ring, then all-gather around it.

    Cost: 2(p-1) steps, 2(p-1)/p * nbytes sent per rank.
    In step k of the first phase rank r sends partition r-k and receives r-k-1; it ends with
    partition r+1 complete.

        p=3     step 0    step 1    | step 0    step 1
        rank 0  0 ->      2 ->      | 1 ->      0 ->
        rank 1  1 ->      0 ->      | 2 ->      1 ->
        rank 2  2 ->      1 ->      | 0 ->      2 ->
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Send(Out((rank - k) % size), to=(right,))
        yield Reduce(Out((rank - k - 1) % size), frm=(left, rank))
    for k in range(size - 1):
        yield Send(Out((rank + 1 - k) % size), to=(right,))
        yield Recv(Out((rank - k) % size), frm=left)
    if size == 1:
        yield Reduce(Out(0), frm=(0,))


def reduce_scatter(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Partial sums travel around the ring and end, complete, at their destination.

    Cost: p-1 steps, (p-1)/p * nbytes sent per rank.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        yield Send(In(left), to=(right,))
    for k in range(2, size):
        block = (rank - k) % size
        yield Reduce(Tmp(block), frm=(left, rank), own=In(block))
        yield Send(Tmp(block), to=(right,))
    yield Reduce(Out(0), frm=(left, rank) if size > 1 else (0,), own=In(rank))


def all_gather(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Blocks travel around the ring; every rank keeps a copy.

    Cost: p-1 steps, (p-1)/p * nbytes of the whole result sent per rank.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    yield Copy(Out(rank), In(0))
    for k in range(size - 1):
        yield Send(Out((rank - k) % size), to=(right,))
        yield Recv(Out((rank - k - 1) % size), frm=left)
