"""Which algorithm for which operation, size and placement.

On one host the direct algorithms win: a rank writes once for all its readers. On several hosts the cost model
prices the algorithms that can win there, and the cheapest is taken. The price of a message is a constant, the
same on all ranks, because all ranks have to choose alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.prices import Price

__all__ = ["CANDIDATES", "Chooser", "choose"]

ONE_SHOT_BYTES = 16 * 1024
"""Work that every rank may do for all: up to here it costs less than a second round of waiting."""

CANDIDATES: dict[str, tuple[str, ...]] = {
    "broadcast": ("leaders", "hierarchical", "double_tree"),
    "reduce": ("leaders", "hierarchical"),
    "all_reduce": ("leaders", "halving_doubling", "hierarchical"),
    "gather": ("direct",),  # blocks may differ in size, which only the root knows
    "all_gather": ("hierarchical", "bruck", "doubling"),
    "scatter": ("direct",),
    "reduce_scatter": ("hierarchical", "halving"),
    "all_to_all": ("direct", "pairwise"),
    "scan": ("direct", "linear"),
    "exclusive_scan": ("direct",),
    "barrier": ("leaders", "dissemination"),
}
"""What is priced on several hosts; the first of equals is taken."""


class Chooser:
    """Chooses for one group, and remembers the prices.

    Args:
        size: the number of ranks.  hosts: the number of the host of each; () stands for one host.
    """

    def __init__(self, size: int, hosts: tuple[int, ...] = ()) -> None:
        self._size = size
        self._hosts = hosts
        self._one_host = len(set(hosts)) <= 1
        self._prices: dict[str, dict[str, Price]] = {}

    def choose(self, collective: str, nbytes: int) -> str:
        """The algorithm for `nbytes` per rank (all_gather, reduce_scatter: per block); ranks ask alike."""
        if self._one_host:
            return self.direct(collective, nbytes)
        if len(CANDIDATES[collective]) == 1:
            return CANDIDATES[collective][0]
        whole = nbytes * self._size if collective in ("all_gather", "reduce_scatter") else nbytes
        prices = self.prices(collective)
        return min(prices, key=lambda algorithm: prices[algorithm](whole))

    def prices(self, collective: str) -> dict[str, Price]:
        """The price of every candidate."""
        found = self._prices.get(collective)
        if found is None:
            from unisono.prices import Price  # only here: many ranks on one host start sooner

            found = self._prices[collective] = {
                algorithm: Price(collective, algorithm, self._size, self._hosts)
                for algorithm in CANDIDATES[collective]
            }
        return found

    def direct(self, collective: str, nbytes: int) -> str:
        """The choice on one host; also where contributions have to be combined in the order of ranks."""
        if collective == "all_reduce":
            return "one_shot" if nbytes * (self._size - 1) <= ONE_SHOT_BYTES else "two_shot"
        return "dissemination" if collective == "barrier" else "direct"


def choose(collective: str, size: int, nbytes: int, hosts: tuple[int, ...] = ()) -> str:
    """The algorithm for `nbytes` per rank among `size` ranks; `hosts` is the host of each, () one host.

    Example: choose("all_reduce", 4, 64 << 20, (0, 0, 1, 1)) == "hierarchical"
    """
    return Chooser(size, hosts).choose(collective, nbytes)
