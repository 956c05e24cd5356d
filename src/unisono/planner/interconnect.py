"""The links of a job in two levels, and what a collective on them takes.

Rank order is that of `up.Plan`: tensor is the fastest axis, then context, data, pipeline. All groups of an
axis work at the same time, so ranks of a host share its ports.

The prices are those of rings, or of halving and doubling where latencies matter more (Thakur, Rabenseifner,
Gropp, IJHPCA 2005), in each host and between hosts, where each rank of a group moves its part. `un.simulate`
runs the same algorithms step by step; the tests compare the two.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from unisono.networks import Network
from unisono.planner.hardware import Hardware, LinkRate

__all__ = ["Interconnect", "RankLayout", "collective_s", "interconnect_of", "message_s"]

FACTORS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Passes over the ring."""


class Interconnect(NamedTuple):
    """Equal hosts: `ranks` of each, a rank's link `inside`, and its share of the ports `between` hosts."""

    name: str
    ranks: int
    inside: LinkRate
    between: LinkRate


class RankLayout(NamedTuple):
    """Where the ranks of a group are: `size` of them, `per_host` on each host."""

    size: int
    per_host: int

    @classmethod
    def of(cls, size: int, stride: int, ranks: int, total: int) -> RankLayout:
        """The worst layout of the groups 0, stride, 2 x stride ... of `total` ranks, on hosts of `ranks`.

        Groups begin anywhere in a host if their sizes do not divide it.
        Example: of(4, 2, 8, 64) has all on one host; of(4, 8, 8, 64) has four hosts; of(8, 4, 8, 64) two on
        each of four; of(3, 1, 8, 24) two hosts, for ranks 6, 7 and 8.
        """
        if total <= ranks:
            return cls(size, size)
        block, length = size * stride, (size - 1) * stride
        begins = (begin % ranks for begin in range(0, min(total, block * ranks), block))
        # Of the `stride` groups of a block, the one that begins nearest to the end of a host.
        latest = max(min(begin + stride, ranks) - 1 for begin in begins)
        hosts = min(size, (latest + length) // ranks + 1)
        return cls(size, -(-size // hosts))


def collective_s(
    collective: str, layout: RankLayout, nbytes: float, links: Interconnect, share: float
) -> float:
    """Seconds of a collective on a buffer of `nbytes`; `share` is that of the links' rates which it gets.

    Cost: each pass moves (p-1)/p x nbytes for p ranks of a host over their inner links, and for p hosts over
    the ports of the group's ranks. Segments overlap the two, so the longer one counts.
    """
    if collective == "all_to_all":
        return _all_to_all_s(layout, nbytes, links, share)
    size, passes = layout.size, FACTORS[collective]
    if size == 1 or not nbytes:
        return 0.0
    each, hosts = layout.per_host, -(-size // layout.per_host)
    inner = (each - 1) / each / links.inside.bytes_per_s
    outer = (hosts - 1) / hosts / (links.between.bytes_per_s * each)
    latency = _steps(each) * links.inside.latency_s + _steps(hosts) * links.between.latency_s
    return passes * (nbytes * max(inner, outer) / share + latency)


def _all_to_all_s(layout: RankLayout, nbytes: float, links: Interconnect, share: float) -> float:
    """Seconds of an all-to-all in which each rank has `nbytes`, as much for each rank of the group.

    Cost: (each-1)/p x nbytes over the inner links and (p-each)/p x nbytes over the port, both at once, for
    `each` of p ranks on a host; a message to each rank.
    """
    size, each = layout.size, layout.per_host
    if size == 1 or not nbytes:
        return 0.0
    inner = (each - 1) / size / links.inside.bytes_per_s
    outer = (size - each) / size / links.between.bytes_per_s
    latency = links.between.latency_s if size > each else links.inside.latency_s
    return nbytes * max(inner, outer) / share + latency


def message_s(nbytes: float, links: Interconnect, share: float, *, inside: bool) -> float:
    """Seconds of one message to the next stage of a pipeline."""
    link = links.inside if inside else links.between
    return nbytes / (link.bytes_per_s * share) + link.latency_s


def _steps(size: int) -> int:
    """Of a pass: those of a ring, or of halving and doubling, which fold other numbers than powers of two."""
    return min(size - 1, math.ceil(math.log2(size)) + (size & (size - 1) != 0)) if size > 1 else 0


def interconnect_of(hardware: Hardware, network: Network | None, ranks: int) -> Interconnect:
    """The links of `ranks` ranks: those of a network, or of the hardware.

    Of a network: the routes of a ring in the first host, and those from its ranks to the last host; ranks
    whose routes share a link share its rate.

    Raises:
        ValueError: the network has too few ranks, or hosts that differ.
    """
    if network is None:
        return Interconnect(hardware.name, hardware.ranks, hardware.inside, hardware.between)
    if network.size < ranks:
        raise ValueError(f"the network {network.name} has {network.size} ranks, and {ranks} are needed")
    counts = Counter(network.hosts)
    each = counts[network.hosts[0]]
    last = network.hosts[-1]
    if any(count != each for host, count in counts.items() if host != last) or counts[last] > each:
        raise ValueError(
            f"the hosts of {network.name} have {min(counts.values())} to {max(counts.values())} ranks: "
            "hosts that differ are not planned yet"
        )
    costs = network.costs_of(0)
    busy = costs.o_send_s + costs.o_recv_s
    ring = [(rank, (rank + 1) % each) for rank in range(each)]
    inside = _shared(network, ring, busy) if each > 1 else LinkRate(busy, math.inf)
    if len(counts) == 1:
        return Interconnect(network.name, each, inside, inside)
    pairs = [(rank, network.size - each + rank) for rank in range(each)]
    return Interconnect(network.name, each, inside, _shared(network, pairs, busy))


def _shared(network: Network, pairs: list[tuple[int, int]], busy_s: float) -> LinkRate:
    """The slowest of some routes that are used at the same time."""
    routes = [network.route(source, target) for source, target in pairs]
    uses = Counter(link for route in routes for link in route)
    rate = min(network.links[link].bytes_per_s / count for link, count in uses.items())
    latency = max(sum(network.links[link].latency_s for link in route) for route in routes)
    return LinkRate(latency + busy_s, rate)
