"""Codes on the edges of a plan: which edges carry them, and what the sender of codes keeps.

A codec turns a message into fewer bytes and loses a little. So that every rank ends with the same bits, the
sender of codes replaces what it has sent by what its receivers decode, wherever it uses that later. A value
that has come as codes is not encoded again, but for a complete sum: `proof` refuses what would.

Edges that carry codes are all edges of a plan, or those between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from unisono.checking import instance
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
"""The algorithms for codes by collective: where all edges carry them, and where those between hosts do."""

IN_PIECES = {"all_reduce": "one_hop"}
"""Those between hosts for buffers of IN_PIECES_BYTES or more: a link goes on while something is encoded."""
IN_PIECES_BYTES = 4 << 20


def none(sender: int, receiver: int) -> bool:  # noqa: ARG001
    """No edge carries codes."""
    return False


def every(sender: int, receiver: int) -> bool:  # noqa: ARG001
    """All edges do."""
    return True


def between(hosts: Sequence[int]) -> Edges:
    """Those between hosts do; `hosts` is the host of each rank, () one host."""
    return lambda sender, receiver: bool(hosts) and hosts[sender] != hosts[receiver]


def coded_edges(coding: str, hosts: Sequence[int]) -> Edges:
    """Which edges carry codes.

    Raises:
        PlanError: there is no such choice of edges.
    """
    if instance(coding, str, "coding") not in ("", BETWEEN, ALL):
        raise PlanError(f"coding is {coding!r}, expected '', 'between' or 'all'")
    return none if not coding else every if coding == ALL else between(hosts)


def apart(steps: StepFunction, edges: Edges) -> StepFunction:
    """The same algorithm; what goes as codes to some ranks and as values to others goes as codes first."""

    def cut(rank: int, size: int, root: int) -> Iterator[Step]:
        for step in steps(rank, size, root):
            coded = tuple(peer for peer in step.to if edges(rank, peer)) if isinstance(step, Send) else ()
            if isinstance(step, Send) and coded and len(coded) < len(step.to):
                yield Send(step.chunk, to=coded)
                step = Send(step.chunk, to=tuple(peer for peer in step.to if peer not in coded))
            yield step

    return cut


def rounds(collective: str, rank: int, root: int, steps: Sequence[Step], edges: Edges) -> list[bool]:
    """For every step, whether it sends codes of a chunk that this rank uses later, and so keeps as decoded.

    A chunk is used where another step reads it before one writes it, or where it is a result.
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
        written, *read = _touched(rank, step)
        used[written] = False
        used.update(dict.fromkeys(read, True))
    return found


def _touched(rank: int, step: Copy | Recv | Reduce) -> Iterable[Chunk]:
    """What a step writes, and then what it reads."""
    if isinstance(step, Copy):
        return step.dst, step.src
    if isinstance(step, Reduce) and rank in step.frm:
        return step.chunk, step.own or step.chunk
    return (step.chunk,)
