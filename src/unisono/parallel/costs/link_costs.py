"""What collectives and messages take on the links of hardware files: the prices of `unisono plan`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.planner.cluster import slowest
from unisono.planner.interconnect import Interconnect, RankLayout, all_to_all_s, collective_s, message_s

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec
    from unisono.planner.hardware import Hardware

__all__ = ["LinkCosts"]


class LinkCosts:
    """Prices of one job, as `CollectiveCosts` has them for this machine.

    Args:
        hardware: of each host.    hosts: number of the host of each rank, by rank.
    """

    def __init__(self, hardware: Sequence[Hardware], hosts: Sequence[int]) -> None:
        self._hardware, self._hosts = tuple(hardware), tuple(hosts)
        self._slowest = functools.cache(self._of)

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        """A call among these ranks, while all other groups of the job make theirs.

        Args:
            nbytes: of the whole buffer: of an all_gather the result, of a reduce_scatter the input.
        """
        here = Counter(self._hosts[rank] for rank in members)
        links, share = self._slowest(frozenset(here))
        layout = RankLayout(len(members), max(here.values()))
        if collective == "all_to_all":
            return all_to_all_s(layout, nbytes, links, share)
        return collective_s(collective, layout, nbytes, links, share)

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        """Raise ValueError: codecs are of the CPU."""
        del members, nbytes, codec
        raise ValueError("compression takes f32 gradients in CPU memory")

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        """A message between two ranks, at one end; each rank has its own share of the ports."""
        del beside
        ends = {self._hosts[sender], self._hosts[receiver]}
        links, share = self._slowest(frozenset(ends))
        return message_s(nbytes, links, share, inside=len(ends) == 1)

    def _of(self, hosts: frozenset[int]) -> tuple[Interconnect, float]:
        """The slowest links of these hosts, and the share of their rates that a step gets."""
        found = slowest(list(dict.fromkeys(self._hardware[host] for host in hosts)))
        links = Interconnect(found.name, found.ranks, found.inside, found.between)
        return links, found.efficiency.links
