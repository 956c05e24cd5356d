"""Algorithms in which every rank sends to all others at once. They are the best ones inside one host, where
sending to many ranks costs one write.

Source: the shared-memory schemes of Graham and Shipman, "MPI Support for Multi-core Architectures:
Optimized Shared Memory Collectives", EuroPVM/MPI 2008; one-shot and two-shot are NCCL's words.
Reductions are written in the order of ranks, so all of these give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Copy, In, Out, Recv, Reduce, Send, Step, others


def all_reduce_one_shot(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends its whole buffer to all ranks and reduces all of them: one step, p times the work."""
    yield Send(Out(0), to=others(rank, size))
    yield Reduce(Out(0), frm=tuple(range(size)))


def all_reduce_two_shot(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Rank q reduces chunk q and sends it to all ranks: two steps, each sum is computed once."""
    for peer in others(rank, size):
        yield Send(Out(peer), to=(peer,))
    yield Reduce(Out(rank), frm=tuple(range(size)))
    yield Send(Out(rank), to=others(rank, size))
    for peer in others(rank, size):
        yield Recv(Out(peer), frm=peer)


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root writes once, all others read."""
    if rank == root:
        yield Send(Out(0), to=others(rank, size))
    else:
        yield Recv(Out(0), frm=root)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Every rank sends to the root, which reduces."""
    if rank == root:
        yield Reduce(Out(0), frm=tuple(range(size)))
    else:
        yield Send(Out(0), to=(root,))


def all_gather(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank writes its block once; all others read it."""
    yield Send(In(0), to=others(rank, size))
    yield Copy(Out(rank), In(0))
    for peer in others(rank, size):
        yield Recv(Out(peer), frm=peer)


def gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Every rank sends its block to the root."""
    if rank != root:
        yield Send(In(0), to=(root,))
        return
    yield Copy(Out(root), In(0))
    for peer in others(root, size):
        yield Recv(Out(peer), frm=peer)


def scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends every rank its block."""
    if rank != root:
        yield Recv(Out(0), frm=root)
        return
    for peer in others(root, size):
        yield Send(In(peer), to=(peer,))
    yield Copy(Out(0), In(root))


def reduce_scatter(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends block q to rank q, which reduces it."""
    for peer in others(rank, size):
        yield Send(In(peer), to=(peer,))
    yield Reduce(Out(0), frm=tuple(range(size)), own=In(rank))


def all_to_all(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends block q to rank q."""
    for peer in others(rank, size):
        yield Send(In(peer), to=(peer,))
    yield Copy(Out(rank), In(rank))
    for peer in reversed(others(rank, size)):
        yield Recv(Out(peer), frm=peer)


def barrier(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank notifies all others: one round, in which each rank runs once."""
    yield Send(Out(0), to=others(rank, size))
    yield Reduce(Out(0), frm=tuple(range(size)))


def scan(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Every rank sends to all ranks above it and reduces the buffers of the ranks below."""
    yield Send(Out(0), to=tuple(range(rank + 1, size)))
    yield Reduce(Out(0), frm=tuple(range(rank + 1)))


def exclusive_scan(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """`scan` without the own contribution; the buffer of rank 0 does not change."""
    yield Send(Out(0), to=tuple(range(rank + 1, size)))
    if rank > 0:
        yield Reduce(Out(0), frm=tuple(range(rank)))
