"""The dissemination barrier.

Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization",
Int. J. Parallel Program. 17 (1988).
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Out, Reduce, Send, Step


def barrier(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """In round k a rank notifies the rank 2^k to its right. Cost: ceil(log2 p) rounds, no bytes."""
    for k in range((size - 1).bit_length()):
        yield Send(Out(0), to=((rank + (1 << k)) % size,))
        yield Reduce(Out(0), frm=(rank, (rank - (1 << k)) % size))
