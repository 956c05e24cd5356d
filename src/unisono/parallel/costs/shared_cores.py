"""A pipeline whose ranks share cores: those that compute at a time divide them, one that waits takes none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["MOST_ACTIONS", "ActionWork", "SharedTime", "shared_time"]

MOST_ACTIONS = 5000
"""Of all ranks: a longer schedule is not run here."""


ROUNDING = 1e-9


class ActionWork(NamedTuple):
    """One action of a rank: it waits for a message, computes, and may send one.

    Args:
        compute: seconds on a core of its own.  other: seconds that do not get longer, as those of messages.
    """

    compute: float
    other: float
    needs: Hashable = None
    gives: Hashable = None


class SharedTime(NamedTuple):
    """When the last rank has finished, and how many times as long each computed as on its own core."""

    seconds: float
    slower: list[float]


class _Rank:
    """Where one rank is in its order."""

    def __init__(self, order: Sequence[ActionWork]) -> None:
        self.left = list(reversed(order))
        self.compute = self.other = 0.0  # of the action under way
        self.running = False
        self.spent = 0.0  # in compute

    def begin(self, arrived: set[Hashable]) -> None:
        """Take the next action, if its message is there."""
        if not self.running and self.left and (self.left[-1].needs is None or self.left[-1].needs in arrived):
            self.running, self.compute, self.other = True, self.left[-1].compute, self.left[-1].other

    def advance(self, seconds: float, rate: float, arrived: set[Hashable]) -> None:
        """Go on for so long; an action that ends may give its message."""
        if self.compute > 0:
            self.spent += seconds
            self.compute = _less(self.compute, seconds * rate)
        else:
            self.other = _less(self.other, seconds)
        if self.compute == self.other == 0.0:
            self.running = False
            gives = self.left.pop().gives
            if gives is not None:
                arrived.add(gives)


def _less(left: float, done: float) -> float:
    """What is left; nothing where only rounding is."""
    return 0.0 if left - done <= ROUNDING * done else left - done


def shared_time(
    orders: Sequence[Sequence[ActionWork]], copies: Sequence[Mapping[int, int]], cores: float
) -> SharedTime:
    """Run the orders of all ranks of a pipeline.

    Args:
        copies: of each, host -> how many ranks of the job do the same there at the same time.
        cores: of each host.
    Example: two ranks that wait for nothing and compute a second each take two seconds on one core.
    """
    ranks, arrived, now = [_Rank(order) for order in orders], set[Hashable](), 0.0
    while True:
        for rank in ranks:
            rank.begin(arrived)
        running = [number for number, rank in enumerate(ranks) if rank.running]
        if not running:
            break
        load: Counter[int] = Counter()
        for number in running:
            if ranks[number].compute > 0:
                load.update(copies[number])
        rates = {
            number: min((min(1.0, cores / load[host]) for host in copies[number] if load[host]), default=1.0)
            for number in running
        }
        until = min(
            ranks[number].compute / rates[number] if ranks[number].compute > 0 else ranks[number].other
            for number in running
        )
        for number in running:
            ranks[number].advance(until, rates[number], arrived)
        now += until
    whole = [sum(each.compute for each in order) for order in orders]
    slower = [rank.spent / alone if alone else 1.0 for rank, alone in zip(ranks, whole, strict=True)]
    return SharedTime(now, slower)
