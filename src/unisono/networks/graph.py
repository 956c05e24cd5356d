"""Networks of named nodes and single cables, such as those read from files: routes are found, not computed.

A route has the fewest links. Where several neighbours are equally near the target, the number of the target
rank chooses among them, in the order of their cables.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from unisono.networks.costs import Costs
from unisono.networks.fabric import Cable
from unisono.networks.network import FULL, HALF, Family, Links, Machine, Network, Switch, numbered

__all__ = ["Connection", "GraphRouter", "RankLocation", "network_of"]


class Connection(NamedTuple):
    """A cable between two nodes; back: the way back, if it differs."""

    ends: tuple[str, str]
    cable: Cable
    back: Cable | None = None


class RankLocation(NamedTuple):
    """Where a rank is.

    Attributes:
        node: its node.  host: the number of its host.  costs: an index.
    """

    node: str
    host: int
    costs: int = 0


def network_of(
    name: str,
    places: Sequence[RankLocation],
    connections: Sequence[Connection],
    machines: Sequence[Machine],
    *,
    memories: dict[str, Cable],
    costs: tuple[Costs, ...] = (Costs(),),
    adders: Sequence[tuple[str, float]] = (),
) -> Network:
    """A network of nodes and cables.

    Args:
        places: of each rank.
        memories: what ranks of the same node share, by node; needed for nodes of several ranks.
        adders: the switches that add, and their rate (0: that of their links).
    Raises:
        ValueError: a rank cannot reach another one; the message names both.
    """
    families, ways = _families(connections)
    for node, memory in memories.items():
        families.append(
            _single(f"{node}.ranks", f"{node}.memory", Cable(memory.latency_s, memory.bytes_per_s, HALF))
        )
    numbers = numbered(families)
    inside = {node: numbers[len(families) - len(memories) + n].base for n, node in enumerate(memories)}
    router = GraphRouter(
        [place.node for place in places],
        _neighbours(ways, numbers),
        inside,
        [each for each, _ in adders],
        connections,
    )
    router.check()
    return Network(
        name=name,
        size=len(places),
        hosts=tuple(place.host for place in places),
        machines=tuple(machines),
        links=Links(numbers),
        router=router,
        costs=costs,
        costs_index=tuple(place.costs for place in places) if len(costs) > 1 else (),
        switches=tuple(Switch(node, rate) for node, rate in adders),
    )


def _single(source: str, target: str, cable: Cable, *, back: bool = False) -> Family:
    def name(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    return Family(name(source).format, name(target).format, (), (), *cable, back=back)


def _families(connections: Sequence[Connection]) -> tuple[list[Family], list[tuple[str, str]]]:
    """A family for each direction of each cable, and the ends of each. Parallel cables get a number."""
    families, ways = [], []
    seen: dict[tuple[str, ...], int] = {}
    for ends, cable, back in connections:
        key = tuple(sorted(ends))
        seen[key] = seen.get(key, 0) + 1
        suffix = f"#{seen[key]}" if seen[key] > 1 else ""
        source, target = ends
        families.append(_single(source, target + suffix, cable))
        families.append(_single(target, source + suffix, back or cable, back=cable.duplex != FULL))
        ways += [(source, target), (target, source)]
    return families, ways


def _neighbours(
    ways: Sequence[tuple[str, str]], families: Sequence[Family]
) -> dict[str, list[tuple[str, int]]]:
    """The neighbours of each node, with the number of the link to it."""
    found: dict[str, list[tuple[str, int]]] = {}
    for (source, target), family in zip(ways, families, strict=False):  # memories follow
        found.setdefault(source, []).append((target, family.base))
    return found


MOST_DISTANCES = 1 << 26
"""Numbers that a router keeps: distances of all nodes, to as many of them as that allows."""


class GraphRouter:
    """Shortest routes; the distances to a node are computed when a route to it is first asked for.

    Attributes:
        nodes: of each rank.  neighbours: of each node, with the numbers of the links.
        inside: the link that the ranks of a node share, by node.  connections: all cables.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        neighbours: dict[str, list[tuple[str, int]]],
        inside: dict[str, int],
        adders: Sequence[str],
        connections: Sequence[Connection],
    ) -> None:
        self.nodes, self.neighbours, self.inside = nodes, neighbours, inside
        self.connections = connections
        names = dict.fromkeys((*neighbours, *nodes, *adders))
        names.update((node, None) for ways in neighbours.values() for node, _ in ways)
        self._names = list(names)
        numbers = {name: number for number, name in enumerate(self._names)}
        self._ranks = [numbers[node] for node in nodes]
        self._adders = [numbers[node] for node in adders]
        self._inside = {numbers[node]: link for node, link in inside.items()}
        self._ways: list[list[tuple[int, int]]] = [[] for _ in self._names]
        self._into: list[list[int]] = [[] for _ in self._names]
        self._direct: dict[tuple[int, int], list[int]] = {}
        for source, targets in neighbours.items():
            for target, link in targets:
                here, there = numbers[source], numbers[target]
                self._ways[here].append((there, link))
                self._into[there].append(here)
                self._direct.setdefault((here, there), []).append(link)
        self._to = lru_cache(maxsize=max(16, MOST_DISTANCES // len(self._names)))(self._distances)

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """The links from a rank to another."""
        return self._found(self._ranks[source], self._ranks[target], target)

    def to_switch(self, source: int, switch: int) -> tuple[int, ...]:
        """The links from a rank to a switch that adds."""
        return self._found(self._ranks[source], self._adders[switch], switch)

    def from_switch(self, switch: int, target: int) -> tuple[int, ...]:
        """The links from a switch that adds to a rank."""
        return self._found(self._adders[switch], self._ranks[target], target)

    def check(self) -> None:
        """Refuse a network in which rank 0 cannot reach another rank, or the other way round."""
        first = self._ranks[0]
        reached = {first}
        waiting = deque(reached)
        while waiting:
            for node, _ in self._ways[waiting.popleft()]:
                if node not in reached:
                    reached.add(node)
                    waiting.append(node)
        back = self._to(first)
        for rank, node in enumerate(self._ranks):
            if node not in reached or back[node] < 0:
                source, target = (0, rank) if node not in reached else (rank, 0)
                raise ValueError(
                    f"no route from rank {source} (on {self.nodes[source]}) to rank {target} "
                    f"(on {self.nodes[target]}): no cables connect the two"
                )

    def _found(self, here: int, target: int, choice: int) -> tuple[int, ...]:
        if here == target:
            return (self._inside[here],) if here in self._inside else ()
        distances = self._to(target)
        links: list[int] = []
        if distances[here] < 0:
            raise ValueError(f"no route from {self._names[here]} to {self._names[target]}")
        while distances[here] > 1:
            nearer = [way for way in self._ways[here] if distances[way[0]] == distances[here] - 1]
            here, link = nearer[choice % len(nearer)]
            links.append(link)
        last = self._direct[here, target]
        return (*links, last[choice % len(last)])

    def _distances(self, target: int) -> array[int]:
        """The number of links from each node to this one; -1: there is no route."""
        found = array("i", [-1]) * len(self._names)
        found[target] = 0
        waiting = deque([target])
        while waiting:
            node = waiting.popleft()
            for source in self._into[node]:
                if found[source] < 0:
                    found[source] = found[node] + 1
                    waiting.append(source)
        return found
