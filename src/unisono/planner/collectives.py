"""The links of a job in two levels, what a collective on them takes, and what the axes of a plan exchange.

Rank order is that of `up.Plan`: tensor is the fastest axis, then context, data, pipeline. All groups of an
axis work at the same time, so ranks of a host share its ports. The prices are those of rings, or of halving
and doubling where latencies matter more (Thakur, Rabenseifner, Gropp, IJHPCA 2005), in each host and between
hosts, where each rank of a group moves its part. `un.simulate` runs the same algorithms step by step; the
tests compare the two.

Ranks that share sequences attend to all of them as a ring, or by an exchange of heads. Ring: keys and values
travel to the next rank while those that are there are at work; backward their gradients travel along, in f32.
Heads: four all-to-alls give each rank the whole sequence of some heads; so do four backward. The one that
sends for less time is taken, as `unisono.parallel` does.

Ranks that spread experts send rows of tokens to their experts, and back. "experts": a row for each expert of
a token, as `unisono.parallel` sends them. "hosts": a row goes once to each host that has some of a token's
experts, and there once to each rank that has some; a router may keep a token's experts on few hosts.

Sources: Liu et al., Ring Attention, 2023 (arXiv:2310.01889); Jacobs et al., DeepSpeed Ulysses, 2023
(arXiv:2309.14509); DeepSeek-V3, 2024 (arXiv:2412.19437), sections 2.1.2 and 3.2.2; DeepEP, DeepSeek (2025).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from unisono.networks import Network
from unisono.planner.hardware import Hardware, Interconnect, LinkRate
from unisono.planner.stages import expert_rows, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan

FACTORS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Passes over the ring."""


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
    the ports of the group's ranks. Segments overlap the two, so the longer one counts. An all-to-all moves
    (each-1)/p x nbytes over the inner links and (p-each)/p x nbytes over the port, for `each` of p ranks on a
    host; a message to each rank.
    """
    size, each = layout
    if size == 1 or not nbytes:
        return 0.0
    if collective == "all_to_all":
        inner = (each - 1) / size / links.inside.bytes_per_s
        outer = (size - each) / size / links.between.bytes_per_s
        latency = links.between.latency_s if size > each else links.inside.latency_s
        return nbytes * max(inner, outer) / share + latency
    passes, hosts = FACTORS[collective], -(-size // each)
    inner = (each - 1) / each / links.inside.bytes_per_s
    outer = (hosts - 1) / hosts / (links.between.bytes_per_s * each)
    latency = _steps(each) * links.inside.latency_s + _steps(hosts) * links.between.latency_s
    return passes * (nbytes * max(inner, outer) / share + latency)


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


# ---- of a job's groups -----------------------------------------------------------------------------------


class GroupPrices:
    """Seconds of calls of groups of `size` ranks, `stride` apart, of one job.

    Where hosts differ, groups within blocks of `near` ranks have the links of `job`, and larger ones those of
    `wide`.
    """

    def __init__(self, job: TrainingJob, wide: TrainingJob | None = None, near: int = 0) -> None:
        self._links, self._share = job.links, job.hardware.efficiency.links
        self._wide = None if wide is None else GroupPrices(wide)
        self._ranks, self._near = job.ranks, near
        self._layouts: dict[tuple[int, int], RankLayout] = {}

    def collective_s(self, name: str, size: int, stride: int, nbytes: float) -> float:
        """An all_reduce, reduce_scatter, all_gather or all_to_all."""
        if size == 1:
            return 0.0
        if self._wide is not None and self._near % (size * stride):
            return self._wide.collective_s(name, size, stride, nbytes)
        return collective_s(name, self._layout(size, stride), nbytes, self._links, self._share)

    def ranks_of_host(self, size: int, stride: int) -> int:
        """Ranks of a group that are on one host."""
        return self._layout(size, stride).per_host

    def two_level_s(self, inside: float, outside: float) -> float:
        """Bytes that a rank sends within its host and to others, both at once."""
        links = self._links
        seconds = max(inside / links.inside.bytes_per_s, outside / links.between.bytes_per_s) / self._share
        return seconds + links.inside.latency_s + (links.between.latency_s if outside else 0.0)

    def hop_s(self, size: int, stride: int, nbytes: float) -> float:
        """A message to the next rank of the group, where some rank's next is farthest."""
        if self._wide is not None and self._near % (size * stride):
            return self._wide.hop_s(size, stride, nbytes)
        layout = self._layout(size, stride)
        return message_s(nbytes, self._links, self._share, inside=layout.per_host == size)

    def stage_s(self, ranks: int, nbytes: float) -> float:
        """A message to the next stage of a plan of so many ranks."""
        return message_s(nbytes, self._links, self._share, inside=ranks <= self._links.ranks)

    def _layout(self, size: int, stride: int) -> RankLayout:
        key = size, stride
        if key not in self._layouts:
            self._layouts[key] = RankLayout.of(size, stride, self._links.ranks, self._ranks)
        return self._layouts[key]


class ContextExchange(NamedTuple):
    """What attention of a layer and a micro-batch sends on one rank: in hops of a ring, or by heads."""

    nbytes: float  # of all four all-to-alls of a pass, or of the keys and values of one hop
    pass_s: float  # seconds of the four, or of a hop
    gradient_s: float  # of a hop of gradients
    hops: int  # of a pass; 0 by heads
    buffer_bytes: float  # of what is sent and received

    def waited_s(self, core_s: float, gradient_s: float = 0.0) -> float:
        """Seconds of a pass that are waited for beside `core_s` of attention, which hides hops.

        `gradient_s`: backward, of those of the gradients, whose last hop has nothing beside it.
        """
        if not self.hops:
            return self.pass_s
        hop = self.pass_s + gradient_s
        return self.hops * max(0.0, hop - core_s / (self.hops + 1)) + gradient_s


def context_exchange(plan: TrainingPlan, job: TrainingJob, prices: GroupPrices) -> ContextExchange:
    """The cheaper way; a rank that shares nothing sends nothing."""
    size, stride, shape = plan.context, plan.tensor, job.shape
    if size == 1:
        return ContextExchange(0.0, 0.0, 0.0, 0, 0.0)
    tokens = sequence_part(plan, job)
    keys = tokens * (shape.keys(plan.tensor) + shape.values(plan.tensor))
    hop = prices.hop_s(size, stride, keys * job.width)
    gradient = prices.hop_s(size, stride, keys * 4)
    ring = ContextExchange(keys * job.width, hop, gradient, size - 1, 2 * keys * (job.width + 4))
    if shape.heads // plan.tensor % size or shape.key_heads % (plan.tensor * size):
        return ring
    heads = shape.heads // plan.tensor
    parts = [tokens * heads * shape.head, tokens * heads * shape.value_head]
    parts += [tokens * shape.keys(plan.tensor), tokens * shape.values(plan.tensor)]
    sent = [part * job.width for part in parts]
    pass_s = sum(prices.collective_s("all_to_all", size, stride, nbytes) for nbytes in sent)
    exchanged = ContextExchange(sum(sent), pass_s, 0.0, 0, 2 * max(sent))
    ring_s = 2 * (size - 1) * hop + size * gradient
    return exchanged if 2 * pass_s <= ring_s else ring


def expert_exchange(plan: TrainingPlan, job: TrainingJob, prices: GroupPrices) -> tuple[float, float]:
    """Bytes that a rank sends in one of a layer's four all-to-alls, two forward and two backward; seconds."""
    size, stride = plan.expert, plan.tensor * plan.context
    if job.dispatch == "experts":
        nbytes = job.width * expert_rows(plan, job) * job.shape.hidden / plan.tensor
        return nbytes, prices.collective_s("all_to_all", size, stride, nbytes)
    mixed, each = job.shape.mixed, prices.ranks_of_host(size, stride)
    hosts = math.ceil(size / each)
    # A token's experts have to have room on the hosts that the router allows.
    allowed = min(hosts, max(job.routed_hosts or hosts, math.ceil(mixed.top_k * hosts / mixed.count)))
    on_hosts = places_hit(allowed, mixed.count // hosts, mixed.top_k)
    on_ranks = places_hit(allowed * each, mixed.count // size, mixed.top_k)
    row = job.width * sequence_part(plan, job) * job.shape.hidden / plan.tensor * job.imbalance
    outside, inside = on_hosts * (hosts - 1) / hosts * row, on_ranks * (each - 1) / each * row
    return outside + inside, prices.two_level_s(inside, outside)


@lru_cache(maxsize=4096)
def places_hit(places: int, each: int, count: int) -> float:
    """Of so many places with `each` experts, how many have one of `count` different experts, on average.

    Example: places_hit(8, 32, 8) is about 5.3; places_hit(4, 1, 4) == 4.
    """
    total = places * max(1, each)
    count = min(count, total)
    return places * (1 - math.comb(total - max(1, each), count) / math.comb(total, count))
