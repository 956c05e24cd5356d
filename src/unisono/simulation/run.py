"""Runs programs of ranks in the native simulator: its arguments, and what comes back."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from unisono._native import simulate as simulate_native
from unisono.engine.base.validation import instance, listed, not_negative, positive, whole
from unisono.errors import SimulationError
from unisono.networks import Network, find
from unisono.networks.costs import Costs, InsideCosts
from unisono.plans.codes import (
    AWAIT,
    COMPUTE,
    COPY,
    RECV,
    REDUCE,
    RELEASE,
    SEND,
    SEND_IN_PLACE,
    SIGNAL,
    UNTIL,
)
from unisono.plans.plan import MOST_RANKS
from unisono.simulation.folding import Folding
from unisono.simulation.result import Breakdown, Limit, LinkUse, Result, Span

__all__ = ["Blocks", "Conditions", "network_of", "run"]

Blocks = Callable[[int], Iterator[tuple["array[int]", int]]]
"""The number of an actor -> blocks of its codes, and how often each runs."""

WINDOW = 16
"""Messages that an edge holds until its receiver takes them: `plan.EDGE_CAPACITY`, as the engine's."""

KINDS = {
    SEND: "send",
    RECV: "recv",
    REDUCE: "reduce",
    COPY: "copy",
    COMPUTE: "compute",
    SIGNAL: "signal",
    AWAIT: "await",
    UNTIL: "until",
    SEND_IN_PLACE: "send in place",
    RELEASE: "release",
}


MOST_SPANS = 1 << 26
"""Of a timeline: some gigabytes."""


class Conditions(NamedTuple):
    """What differs from the network as it is written.

    Attributes:
        slow: rank -> factor.  delay: rank -> seconds.  rates: link number -> factor; 0: the link is lost.
        spans: how many spans of the timeline are kept.
    """

    slow: Mapping[int, float]
    delay: Mapping[int, float]
    rates: Mapping[int, float]
    spans: int

    @classmethod
    def of(
        cls,
        network: Network,
        slow: Mapping[int, float] | None,
        delay: Mapping[int, float] | None,
        slow_links: Mapping[str | int, float] | None,
        lost_links: Collection[str | int],
        spans: int,
    ) -> Conditions:
        """Checked arguments of `simulate`."""
        last = network.size - 1
        for what, mapping in (("slow", slow), ("delay", delay), ("slow_links", slow_links)):
            if mapping is not None and not isinstance(mapping, Mapping):
                raise TypeError(f"{what} is a {type(mapping).__name__}, expected a dict")
        lost_links = listed([lost_links] if isinstance(lost_links, str) else lost_links, "lost_links")
        slow = {whole(r, "a slow rank", 0, last): not_negative(f, "slow") for r, f in (slow or {}).items()}
        delay = {whole(r, "a late rank", 0, last): not_negative(s, "delay") for r, s in (delay or {}).items()}
        rates = {}
        given = {**dict.fromkeys(lost_links, math.inf), **(slow_links or {})}
        numbers = _numbers(network, given)
        for name, factor in (slow_links or {}).items():
            rates[numbers[name]] = 1 / positive(factor, f"the factor of the slow link {name!r}")
        rates.update({numbers[name]: 0.0 for name in lost_links})
        return cls(slow, delay, rates, whole(spans, "timeline", 0, MOST_SPANS))

    @property
    def uneven(self) -> bool:
        """Whether a rank or a link differs from its images under a symmetry."""
        return bool(self.slow or self.delay or self.rates)

    def costs(self, network: Network, nbytes: float) -> tuple[list[list[float]], list[int]]:
        """The different costs with such a buffer; and which each rank and switch has, []: all the first."""
        kept: dict[tuple[float, ...], int] = {}
        index = []
        numbers = lru_cache(maxsize=256)(partial(_numbers_of, nbytes))
        uniform = not (network.costs_index or self.slow or self.delay or network.switches)
        for rank in range(0 if uniform else network.size):
            costs = numbers(network.costs_of(rank), self.slow.get(rank, 1.0), self.delay.get(rank, 0.0))
            index.append(kept.setdefault(costs, len(kept)))
        for switch in network.switches:
            adds = 1 / switch.adds_bytes_per_s if switch.adds_bytes_per_s else 0.0
            costs = _numbers_of(0, Costs(reduce_s_per_byte=adds), 1.0, 0.0)
            index.append(kept.setdefault(costs, len(kept)))
        if uniform:
            kept[numbers(network.costs[0], 1.0, 0.0)] = 0
        return [list(each) for each in kept], index


def _numbers_of(nbytes: float, costs: Costs, slowdown: float, delay: float) -> tuple[float, ...]:
    """As `simulator::MessageCosts` has them."""
    costs = costs.of_buffer(nbytes)
    inside = costs.inside or InsideCosts()
    return (
        *(costs.o_send_s, costs.o_recv_s, costs.o_s_per_byte, costs.g_s, float(costs.rendezvous_bytes)),
        *(costs.reduce_s_per_byte, costs.copy_s_per_byte, slowdown, delay),
        *(inside.send_s, inside.recv_s, inside.s_per_byte),
        *(inside.write_s_per_byte, inside.in_place_s_per_byte or inside.s_per_byte, costs.wake_s),
    )


def _numbers(network: Network, names: Iterable[str | int]) -> dict[str | int, int]:
    """The numbers of links, given by name or number."""
    found: dict[str | int, int] = {}
    sought = set(names)
    for name in sought:
        if isinstance(name, int):
            found[name] = whole(name, "a link", 0, len(network.links) - 1)
    rest = sought - set(found)
    if rest:
        found.update({link.name: number for number, link in enumerate(network.links) if link.name in rest})
    if missing := rest - set(found):
        first = network.links[0].name if len(network.links) else "none"
        raise ValueError(f"{network.name} has no link {min(map(str, missing))!r}; its first one is {first!r}")
    return found


def network_of(network: Network | str | Path, size: int | None) -> Network:
    """The network, or that of a file or a name."""
    if isinstance(network, Network):
        return network
    name = instance(network, (str, Path), "network")
    return find(name, 0 if size is None else whole(size, "size", 1, MOST_RANKS))


class _NetworkPrograms:
    """What the native simulator asks for."""

    def __init__(self, network: Network, blocks: Blocks, folding: Folding) -> None:
        self._router, self._size, self._folding = network.router, network.size, folding
        self.latency_s: list[float] = network.links.latency_s.tolist()
        self._blocks = blocks
        self._running: dict[int, Iterator[tuple[array[int], int]]] = {}

    def next(self, actor: int) -> tuple[bytes, int] | None:
        """The next block of an actor."""
        running = self._running.get(actor)
        if running is None:
            running = self._running[actor] = self._blocks(actor)
        block = next(running, None)
        if block is None:
            self._running[actor] = iter(())
            return None
        return block[0].tobytes(), block[1]

    def route(self, source: int, target: int) -> tuple[float, list[tuple[int, int]]]:
        """Latency, and links with their weights."""
        if source >= self._size:
            links = self._router.from_switch(source - self._size, target)
        elif target >= self._size:
            links = self._router.to_switch(source, target - self._size)
        else:
            links = self._router.path(source, target)
        latency = self.latency_s
        return sum([latency[link] for link in links]), self._folding.links(links)


def run(
    name: str,
    network: Network,
    blocks: Blocks,
    folding: Folding,
    conditions: Conditions,
    *,
    nbytes: float,
    streams: int = 1,
    working: int = 1,
    switches: bool = False,
    window: int = WINDOW,
) -> Result:
    """Run the programs of all ranks.

    blocks: of an actor: rank + stream * network.size.
    nbytes: of the buffer, which is in a cache or not.
    working: streams of a rank that work, and do more than wait: more of them than cores share these.
    switches: those that add run programs, too: they come after the ranks.
    window: messages that an edge holds until its receiver takes them.

    Raises:
        SimulationError: the run does not end.
    """
    rates = network.links.bytes_per_s.tolist()
    for link, factor in conditions.rates.items():
        rates[link] *= factor
    costs, index = conditions.costs(network, nbytes)
    cores, shares = _cores(network, folding, working, len(rates))
    extra = len(network.switches) if switches else 0
    endpoints = network.size + extra
    programs = _NetworkPrograms(network, blocks, folding)
    found = simulate_native(
        ranks=network.size,
        streams=streams,
        extra=extra,
        digits=list(folding.digits) if folding.order > 1 else [],
        rates=rates + cores,
        costs=costs,
        costs_index=index[:endpoints],
        window=window,
        most_spans=conditions.spans,
        next=programs.next,
        route=programs.route,
        hosts=_hosts_with_costs(network),
        cores=shares,
        latencies=[*programs.latency_s, *[0.0] * len(cores)] if network.stores else [],
        bursts=bursts.tolist() + [0.0] * len(cores) if (bursts := network.links.burst_bytes).any() else [],
    )
    if found["stuck"]:
        raise SimulationError(_stuck(name, network, found["stuck"], endpoints, folding.order))
    return _result(name, network, folding, found, endpoints)


NO_LINK = (1 << 32) - 1


def _cores(
    network: Network, folding: Folding, working: int, first: int
) -> tuple[list[float], list[tuple[int, int]]]:
    """The cores that too many ranks share, as links from number `first` on; how each rank crosses them.

    A rank that stands for others crosses the link as often as there are of those on its cores.
    """
    if network.shared_cores:
        places, cores = [0] * network.size, {0: network.shared_cores}
    else:
        places = list(network.hosts)
        cores = {host: network.machines[host].cores for host in places}
    ranks = Counter(places)
    crowded = [place for place in ranks if 0 < cores[place] < ranks[place] * working]
    if not crowded:
        return [], []
    links = {place: first + number for number, place in enumerate(crowded)}
    standing = folding.standing_rank
    together = Counter((standing(rank), place) for rank, place in enumerate(places))
    shares = [
        (links[place], together[rank, place]) if place in links and together[rank, place] else (NO_LINK, 1)
        for rank, place in enumerate(places)
    ]
    return [float(cores[place]) for place in crowded], shares


def _hosts_with_costs(network: Network) -> list[int]:
    """The host of each rank, where messages within a host have costs of their own; [] if none has."""
    if not any(costs.inside for costs in network.costs):
        return []
    return [
        host if network.costs_of(rank).inside else network.size + rank
        for rank, host in enumerate(network.hosts)
    ]


def _stuck(name: str, network: Network, stuck: list[Any], endpoints: int, order: int) -> str:
    """The first rank whose message waits for a link, or else the first that waits."""
    actor, peer, sends, step, event, link = next((each for each in stuck if each[5] >= 0), stuck[0])
    who = _who(network, actor % endpoints)
    text = f"{name} on {network.name}: {who}, step {step}, waits for ever"
    if event >= 0:
        text += f" for event {event}"
    elif peer != actor:
        what = "takes a message" if sends else "sends a message"
        text += f" until {_who(network, peer % endpoints)} {what}"
    if link >= 0:
        text += f"; a message is stuck on the link {network.links[link].name}, which is lost"
    return text + f" ({len(stuck) * order} of {network.size} ranks wait)"


def _who(network: Network, endpoint: int) -> str:
    if endpoint < network.size:
        return f"rank {endpoint}"
    return f"switch {network.switches[endpoint - network.size].name}"


def _result(name: str, network: Network, folding: Folding, found: dict[str, Any], endpoints: int) -> Result:
    ends: dict[int, float] = {}
    busy: dict[int, float] = {}
    for actor, end, worked in zip(found["actors"], found["ends"], found["busy"], strict=True):
        rank = actor % endpoints
        ends[rank] = max(ends.get(rank, 0.0), end)
        busy[rank] = busy.get(rank, 0.0) + worked
    used = [
        LinkUse(link, network.links[link].name, *use)
        for link, use in enumerate(found["links"][: len(network.links)])
        if use[0] > 0 or use[2] > 0
    ]
    used.sort(key=lambda use: (-use.limiting_s, -use.busy_s, use.link))
    breakdown = Breakdown(*found["chain"])
    standing = folding.standing_rank
    return Result(
        name=name,
        network=network.name,
        size=network.size,
        seconds=found["seconds"],
        messages=found["messages"] * folding.order,
        simulated=found["messages"],
        slowest=found["last"] % endpoints,
        limit=_limit(network, breakdown, used, busy),
        breakdown=breakdown,
        links=used,
        spans=[
            Span(actor % endpoints, actor // endpoints, KINDS[code], step, start, end)
            for actor, code, step, start, end in found["spans"]
        ],
        end_of=lambda rank: ends[standing(rank)],
        busy_of=lambda rank: busy[standing(rank)],
    )


def _limit(network: Network, chain: Breakdown, used: list[LinkUse], busy: dict[int, float]) -> Limit:
    """The largest part of the longest chain, and where it is spent."""
    kind, seconds = max(chain._asdict().items(), key=lambda part: part[1])
    if kind == "transfer_s" and used:
        return Limit("link", used[0].name, used[0].limiting_s)
    if kind in ("overhead_s", "compute_s"):
        busiest = max(busy, key=lambda rank: busy[rank])
        return Limit(kind.removesuffix("_s"), _who(network, busiest), seconds)
    return Limit("latency", "", seconds)
