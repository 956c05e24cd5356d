"""Calls in words, and which ranks called something else than most. Knows nothing of engines and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unisono.buffers import DTYPES
from unisono.plans import CONTRACTS, algorithm_names
from unisono.reduction import PremulSum, ReduceOp

__all__ = ["COLLECTIVES", "Called", "called", "odd_ones"]

COLLECTIVES: tuple[str, ...] = tuple(CONTRACTS)
"""Names of the collectives; a collective's place is its number in the engine."""


class Called(NamedTuple):
    """A call as error texts show it: "all_reduce", ("float64[4]", "SUM", "algorithm=ring")."""

    name: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.words)})"


def called(call: tuple[int, int, int, int, int, int]) -> Called:
    """Words for the numbers by which the engine remembers a call: kind, dtype, op, root, numel, algorithm."""
    kind, dtype, op, root, numel, algorithm = call
    name = COLLECTIVES[kind]
    contract = CONTRACTS[name]
    words = [f"{DTYPES[dtype]}[{numel}]" if numel else f"{DTYPES[dtype]}"] if name != "barrier" else []
    if contract.reduces and name != "barrier":
        words.append(PremulSum(1.0).name if op == PremulSum(1.0).value else ReduceOp(op).name)
    if contract.rooted:
        words.append(f"root={root}")
    names = algorithm_names()
    if algorithm < len(names):
        words.append(f"algorithm={names[algorithm]}")
    return Called(name, tuple(words))


def odd_ones(calls: Sequence[Called | None]) -> str:
    """Who called something else than most, in a sentence; "" where more than half do not agree on a call,
    or those that differ from it differ among themselves.

    Args:
        calls: of every rank; None: not known.
    Example: [A, A, B, A] -> "rank 2 called broadcast, the others all_reduce"
    """
    known = [call for call in calls if call is not None]
    usual, count = Counter(known).most_common(1)[0] if known else (None, 0)
    odd = {rank: call for rank, call in enumerate(calls) if call is not None and call != usual}
    different = set(odd.values())
    if usual is None or 2 * count <= len(known) or len(different) != 1:
        return ""
    ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    others = "the others" if len(known) == len(calls) else "most others"
    one = different.pop()
    if one.name != usual.name:
        return f"{ranks} called {one.name}, {others} {usual.name}"
    pairs = [pair for pair in zip(one.words, usual.words, strict=True) if pair[0] != pair[1]]
    theirs, usually = (", ".join(words) for words in zip(*pairs, strict=True))
    return f"{ranks} called {one.name} with {theirs}, {others} with {usually}"
