"""Which group of an axis takes longest: a step waits for it. Others may lie otherwise on hosts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hardware_prices import Collectives

__all__ = ["RankGroups"]

TRIED_BYTES = 1 << 20
"""Of the call by which groups are compared."""


class RankGroups:
    """The groups of one job.

    Args:
        hosts: number of the host of each rank; (): all are on one.
        costs: of their calls.    kinds: of each host, what its links depend on; (): hosts are equal.
    """

    def __init__(
        self, hosts: Sequence[int] = (), costs: Collectives | None = None, kinds: Sequence[Hashable] = ()
    ) -> None:
        self._hosts, self._costs, self._kinds = tuple(hosts), costs, tuple(kinds)
        self._groups: dict[tuple[int, int], list[int]] = {}
        self._pairs: dict[tuple[int, int, int], tuple[int, int]] = {}

    def slowest(self, size: int, stride: int) -> list[int]:
        """The ranks of the slowest of all groups of `size` ranks, `stride` apart.

        Example: on two hosts of three ranks slowest(2, 1) is [2, 3].
        """
        first = [place * stride for place in range(size)]
        costs = self._costs
        if costs is None or size == 1 or len(set(self._hosts)) == 1:
            return first
        if (size, stride) not in self._groups:
            blocks = range(0, len(self._hosts), size * stride)
            begins = (block + at for block in blocks for at in range(stride))
            found = self._unlike([begin + rank for rank in first] for begin in begins)
            self._groups[size, stride] = max(
                found, key=lambda group: costs.seconds("all_reduce", group, TRIED_BYTES)
            )
        return self._groups[size, stride]

    def farthest(self, sender: int, receiver: int, count: int) -> tuple[int, int]:
        """Of `count` pairs of ranks, of which these are the first, the one whose message takes longest."""
        costs = self._costs
        if costs is None or len(set(self._hosts)) == 1:
            return sender, receiver
        key = sender, receiver, count
        if key not in self._pairs:
            found = self._unlike([sender + at, receiver + at] for at in range(count))
            one, other = max(found, key=lambda pair: costs.message(pair[0], pair[1], TRIED_BYTES, count))
            self._pairs[key] = one, other
        return self._pairs[key]

    def _unlike(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """One of each kind of groups: alike are those whose ranks lie alike on hosts of the same kinds."""
        found: dict[tuple[Hashable, ...], list[int]] = {}
        for group in groups:
            hosts = [self._hosts[rank] for rank in group]
            places = {host: place for place, host in enumerate(dict.fromkeys(hosts))}
            kinds = [self._kinds[host] for host in places] if self._kinds else []
            found.setdefault((*(places[host] for host in hosts), *kinds), group)
        return [*found.values()]
