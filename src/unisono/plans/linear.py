"""The simplest algorithms: the root, or a chain, handles one rank after another. They serve for comparison.

Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
experience", Concurrency Computat.: Pract. Exper. 19 (2007).
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Out, Recv, Reduce, Send, Step, others


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends to one rank after another. Cost: p-1 rounds, nbytes each."""
    if rank != root:
        yield Recv(Out(0), frm=root)
        return
    for peer in others(root, size):
        yield Send(Out(0), to=(peer,))


def scan(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Down the chain. Cost: p-1 rounds, nbytes each."""
    yield Reduce(Out(0), frm=(rank - 1, rank) if rank else (0,))
    if rank + 1 < size:
        yield Send(Out(0), to=(rank + 1,))
