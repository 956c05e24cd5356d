"""The contract of each collective: what its buffers hold before, and must hold afterwards.

A contribution is a pair (rank, block): the data of rank `rank` for block `block`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["CONTRACTS", "Contract", "Contribution"]

Contribution = tuple[int, int]

Expected = Callable[[int, int, int, int], "list[Contribution] | None"]
"""(rank, chunk, size, root) -> the contributions Out(chunk) must hold on that rank; None: anything."""


def no_rank_keeps(rank: int, root: int) -> bool:  # noqa: ARG001
    """Every rank gets a result."""
    return False


def every_rank_gives(rank: int, root: int) -> bool:  # noqa: ARG001
    """Every rank has input."""
    return True


class Contract(NamedTuple):
    """The contract of a collective.

    Attributes:
        in_place: Out starts as the rank's own data, cut into chunks; otherwise In holds it.
        gives: (rank, root) -> whether the rank has input at all (scatter: only the root).
        in_blocks, out_blocks: the number of equal blocks: "p", "1", or "any" where the plan cuts one buffer.
        expected: what Out must hold at the end.
        reduces: contributions are combined, in one order on every rank.
        counts: every contribution exactly once (a barrier only needs one signal from every rank).
        rooted: the root matters.
        keeps: (rank, root) -> whether the rank gets no result, and its buffer must not change.
    """

    in_place: bool
    in_blocks: str
    out_blocks: str
    expected: Expected
    gives: Callable[[int, int], bool] = every_rank_gives
    reduces: bool = False
    counts: bool = True
    rooted: bool = False
    keeps: Callable[[int, int], bool] = no_rank_keeps


def _everybody(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(peer, chunk) for peer in range(size)]


def _root_alone(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:
    return _everybody(rank, chunk, size, root) if rank == root else [(rank, chunk)]


def _of_root(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(root, chunk)]


def _block_of_each(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(chunk, 0)]


def _gathered(rank: int, chunk: int, size: int, root: int) -> list[Contribution] | None:  # noqa: ARG001
    return [(chunk, 0)] if rank == root else None


def _scattered(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(root, rank)]


def _reduced_block(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(peer, rank) for peer in range(size)]


def _exchanged(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(chunk, rank)]


def _up_to(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(peer, chunk) for peer in range(rank + 1)]


def _below(rank: int, chunk: int, size: int, root: int) -> list[Contribution]:  # noqa: ARG001
    return [(peer, chunk) for peer in range(rank)] or [(0, chunk)]


CONTRACTS: dict[str, Contract] = {
    "broadcast": Contract(True, "0", "any", _of_root, rooted=True),
    "reduce": Contract(
        True, "0", "any", _root_alone, reduces=True, rooted=True, keeps=lambda rank, root: rank != root
    ),
    "all_reduce": Contract(True, "0", "any", _everybody, reduces=True),
    "gather": Contract(False, "1", "p", _gathered, rooted=True),
    "all_gather": Contract(False, "1", "p", _block_of_each),
    "scatter": Contract(False, "p", "1", _scattered, gives=lambda rank, root: rank == root, rooted=True),
    "reduce_scatter": Contract(False, "p", "1", _reduced_block, reduces=True),
    "all_to_all": Contract(False, "p", "p", _exchanged),
    "scan": Contract(True, "0", "any", _up_to, reduces=True),
    "exclusive_scan": Contract(True, "0", "any", _below, reduces=True, keeps=lambda rank, _: rank == 0),
    "barrier": Contract(True, "0", "any", _everybody, reduces=True, counts=False),
}
"""All collectives; the index of one is its number in the engine."""
