"""Which algorithm for which operation, size and placement.

On one host the direct algorithms win: a rank writes once for all its readers. On several hosts the cost model
prices the algorithms that can win there, and the cheapest is taken. The price of a message is a constant, the
same on all ranks, because all ranks have to choose alike.
"""

from __future__ import annotations

from unisono.cost import Edge, busiest, seconds
from unisono.plans import make

__all__ = ["CANDIDATES", "Chooser", "choose"]

ONE_SHOT_BYTES = 16 * 1024
"""Work that every rank may do for all: up to here it costs less than a second round of waiting."""

DIRECT_BARRIER_RANKS = 16
"""Ranks that tell each other at once that they have come: more than that take rounds."""

SEGMENT_BYTES = 256 * 1024
"""What the engine takes through a plan at once (kSegmentBytes)."""

INSIDE = Edge(1e-6, 1 / 6e9)
"""A message within a host."""

BETWEEN = Edge(30e-6, 1 / 2e9)
"""A message between hosts, over a socket."""

REDUCING_S_PER_BYTE = 1 / 10e9

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


class Price:
    """Seconds that an algorithm takes for any number of bytes, from three points of the model."""

    def __init__(self, collective: str, algorithm: str, size: int, hosts: tuple[int, ...]) -> None:
        plan = make(collective, algorithm, size, 0, hosts)
        a, b, g = INSIDE.a, INSIDE.b, REDUCING_S_PER_BYTE
        self._empty = seconds(plan, 0, a=a, b=b, g=g, between=BETWEEN)
        self._first = seconds(plan, SEGMENT_BYTES, a=a, b=b, g=g, between=BETWEEN)
        self._further = busiest(plan, SEGMENT_BYTES, inside=INSIDE, between=BETWEEN, g=g)

    def __call__(self, nbytes: float) -> float:
        """Seconds for a whole buffer of `nbytes`: the first segment's way, and what the others add."""
        first = min(nbytes / SEGMENT_BYTES, 1)
        further = nbytes / SEGMENT_BYTES - first
        return self._empty + (self._first - self._empty) * first + self._further * further


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
            found = self._prices[collective] = {
                algorithm: Price(collective, algorithm, self._size, self._hosts)
                for algorithm in CANDIDATES[collective]
            }
        return found

    def direct(self, collective: str, nbytes: int) -> str:
        """The choice on one host; also where contributions have to be combined in the order of ranks."""
        if collective == "all_reduce":
            return "one_shot" if nbytes * (self._size - 1) <= ONE_SHOT_BYTES else "two_shot"
        if collective == "barrier" and self._size > DIRECT_BARRIER_RANKS:
            return "dissemination"
        return "direct"


def choose(collective: str, size: int, nbytes: int, hosts: tuple[int, ...] = ()) -> str:
    """The algorithm for `nbytes` per rank among `size` ranks; `hosts` is the host of each, () one host.

    Example: choose("all_reduce", 4, 64 << 20, (0, 0, 1, 1)) == "hierarchical"
    """
    return Chooser(size, hosts).choose(collective, nbytes)
