"""Codes on the edges of a plan: which edges carry them, and what a sender of codes stores.

A codec encodes a message in fewer bytes, with a small error. All ranks must end with the same bits. So a
sender of codes that uses the sent value later replaces it by the decoded value. A value that arrived as codes
is not encoded again, except as part of a complete sum: `proof` refuses other plans.

Either all edges of a plan carry codes, or only those between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from unisono.engine.base.validation import instance
from unisono.errors import PlanError
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Recv, Reduce, Send, Step, StepFunction

__all__ = [
    "ALL",
    "BETWEEN",
    "CODED",
    "IN_PIECES",
    "IN_PIECES_BYTES",
    "Coding",
    "between",
    "coded_edges",
    "every",
    "none",
    "rounds",
]

Coding = Literal["", "between", "all"]
"""Which edges of a plan carry codes: none, those between hosts, or all."""

ALL: Coding = "all"
BETWEEN: Coding = "between"

Edges = Callable[[int, int], bool]
"""(sender, receiver) -> whether that edge carries codes."""

CODED: dict[str, tuple[str, str]] = {
    "all_reduce": ("two_shot", "hierarchical"),
    "reduce_scatter": ("direct", "one_hop"),
    "all_gather": ("one_hop", "one_hop"),
    "broadcast": ("direct", "one_hop"),
    "reduce": ("direct", "one_hop"),
    "all_to_all": ("direct", "direct"),
}
"""The algorithms for codes by collective: if all edges carry codes, and if only those between hosts do."""

IN_PIECES = {"all_reduce": "one_hop"}
"""Those between hosts for buffers of IN_PIECES_BYTES or more: a link works while a rank encodes."""
IN_PIECES_BYTES = 4 << 20


def none(sender: int, receiver: int) -> bool:  # noqa: ARG001
    """No edge carries codes."""
    return False


def every(sender: int, receiver: int) -> bool:  # noqa: ARG001
    """All edges do."""
    return True


def between(hosts: Sequence[int]) -> Edges:
    """Edges between hosts carry codes. hosts: the host of each rank; (): one host."""
    return lambda sender, receiver: bool(hosts) and hosts[sender] != hosts[receiver]


def coded_edges(coding: str, hosts: Sequence[int]) -> Edges:
    """The edges that carry codes.

    Raises:
        PlanError: `coding` is unknown.
    """
    if instance(coding, str, "coding") not in ("", BETWEEN, ALL):
        raise PlanError(f"coding is {coding!r}, expected '', 'between' or 'all'")
    return none if not coding else every if coding == ALL else between(hosts)


def separate_codes(steps: StepFunction, edges: Edges) -> StepFunction:
    """The same algorithm; a chunk for ranks with codes and ranks with values is sent as codes first."""

    def cut(rank: int, size: int, root: int) -> Iterator[Step]:
        for step in steps(rank, size, root):
            coded = tuple(peer for peer in step.to if edges(rank, peer)) if isinstance(step, Send) else ()
            if isinstance(step, Send) and coded and len(coded) < len(step.to):
                yield Send(step.chunk, to=coded)
                step = Send(step.chunk, to=tuple(peer for peer in step.to if peer not in coded))
            yield step

    return cut


def rounds(collective: str, rank: int, root: int, steps: Sequence[Step], edges: Edges) -> list[bool]:
    """For every step, whether it sends codes of a chunk that this rank uses later, and so stores as decoded.

    A chunk is used if a later step reads it before one writes it, or if it is a result.
    """
    contract = CONTRACTS[collective]
    kept = contract.keeps(rank, root)
    used: dict[Chunk, bool] = {}
    found = [False] * len(steps)
    for number in reversed(range(len(steps))):
        step = steps[number]
        if isinstance(step, Send):
            is_used = used.get(step.chunk, step.chunk.space == "out" and not kept)
            found[number] = is_used and any(edges(rank, peer) for peer in step.to)
            used[step.chunk] = True
            continue
        written, *read = _chunks_of(rank, step)
        used[written] = False
        used.update(dict.fromkeys(read, True))
    return found


def _chunks_of(rank: int, step: Copy | Recv | Reduce) -> Iterable[Chunk]:
    """The chunk that a step writes, and then the chunks that it reads."""
    if isinstance(step, Copy):
        return step.dst, step.src
    if isinstance(step, Reduce) and rank in step.frm:
        return step.chunk, step.own or step.chunk
    return (step.chunk,)
