"""The fabrics that `generators` puts hosts on: which links there are, and which of them a route takes.

Routes are minimal and fixed: where there are several ways, the target decides, so that different targets
spread (in a fat tree this is d-mod-k; Zahavi, Journal of Parallel and Distributed Computing 72, 2012).
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.networks.fabric import Cable, Hop, both_ways
from unisono.networks.network import HALF, Axis, Family, Switch

__all__ = ["Crossbar", "Dragonfly", "FatTree", "FullMesh", "RailOptimised", "Torus"]

Where = tuple[int, ...]
"""The coordinates of a host."""


class Fixed:
    """A fabric without switches that add."""

    axes: tuple[Axis, ...]
    planes = False

    def switches(self) -> tuple[Switch, ...]:
        """None."""
        return ()

    def to_switch(self, source: Where, port: int, switch: int) -> list[Hop]:  # noqa: ARG002
        """There is none."""
        raise ValueError(f"there is no switch {switch} that adds")

    def from_switch(self, switch: int, target: Where, port: int) -> list[Hop]:  # noqa: ARG002
        """There is none."""
        raise ValueError(f"there is no switch {switch} that adds")


class Crossbar(Fixed):
    """All ports of all hosts on one switch that never blocks: only the ports are shared.

    adds_bytes_per_s: the switch can add, each contribution at this rate (0: at that of its links).
    """

    def __init__(self, hosts: int, cable: Cable, adds_bytes_per_s: float | None = None) -> None:
        self.axes = (Axis("host", hosts, "symmetric"),)
        self._cable = cable
        self._adds = adds_bytes_per_s

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:
        """Up and down, for each port of each host."""
        sizes, axes = (self.axes[0].size, ports), (0, port_axis)
        return both_ways(f"{host}.nic{{1}}", "switch", sizes, axes, self._cable)

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:
        """Up and down."""
        return [(0, (*source, leaves)), (1, (*target, arrives))]

    def switches(self) -> tuple[Switch, ...]:
        """The one switch, if it adds."""
        return () if self._adds is None else (Switch("switch", self._adds),)

    def to_switch(self, source: Where, port: int, switch: int) -> list[Hop]:  # noqa: ARG002
        """Up."""
        return [(0, (*source, port))]

    def from_switch(self, switch: int, target: Where, port: int) -> list[Hop]:  # noqa: ARG002
        """Down."""
        return [(1, (*target, port))]


class FatTree(Fixed):
    """Three levels of switches with k ports each: k pods of k/2 edge switches, with k/2 hosts on each.

    An edge switch has k/2 / oversubscription links to the aggregation switches of its pod, of which there are
    as many; each of those has k/2 links to core switches. Ports of a host lie in trees of their own.

    Source: Al-Fares, Loukissas, Vahdat, SIGCOMM 2008; oversubscription as in Leiserson, 1985.
    """

    def __init__(self, k: int, oversubscription: int, cable: Cable) -> None:
        half = k // 2
        kind = "symmetric" if oversubscription == 1 else "cyclic"
        self.axes = (Axis("pod", k, "symmetric"), Axis("edge", half, "symmetric"), Axis("slot", half, kind))
        self.planes = True
        self._up = half // oversubscription
        self._cable = cable

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:
        """Host to edge, edge to aggregation, aggregation to core, and back."""
        k, half = self.axes[0].size, self.axes[1].size
        edge, above, core = "plane{3}.edge{0}-{1}", "plane{3}.aggregation{0}-{2}", "plane{3}.core{1}-{2}"
        axes = (0, 1, 2, port_axis)
        return [
            *both_ways(f"{host}.nic{{3}}", edge, (k, half, half, ports), axes, self._cable),
            *both_ways(edge, above, (k, half, self._up, ports), axes, self._cable),
            *both_ways(above, core, (k, half, self._up, ports), axes, self._cable),
        ]

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:  # noqa: ARG002
        """As far up as needed; the way up is given by the target, the way down is the only one."""
        pod, edge, slot = target
        above = slot % self._up
        up: list[Hop] = [(0, (*source, arrives))]
        down: list[Hop] = [(1, (*target, arrives))]
        if source[:2] != target[:2]:
            up.append((2, (*source[:2], above, arrives)))
            down.insert(0, (3, (pod, edge, above, arrives)))
        if source[0] != pod:
            up.append((4, (source[0], edge, above, arrives)))
            down.insert(0, (5, (pod, edge, above, arrives)))
        return up + down


class RailOptimised(Fixed):
    """Units of hosts; port i of each host is on the leaf switch of rail i, and spines connect all leaves.

    A leaf has one uplink to each of `spines` spines.
    Source: NVIDIA DGX SuperPOD reference architecture, H100.
    """

    def __init__(self, units: int, hosts: int, spines: int, cable: Cable, *, crossing: bool) -> None:
        kind = "cyclic" if spines >= hosts or hosts % spines == 0 else "fixed"
        self.axes = (Axis("unit", units, "symmetric"), Axis("slot", hosts, kind))
        self.planes = not crossing
        self._spines = spines
        self._cable = cable

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:
        """Host to leaf, leaf to spine, and back."""
        units, hosts = self.axes[0].size, self.axes[1].size
        leaf = "leaf{0}.rail{2}"
        return [
            *both_ways(f"{host}.nic{{2}}", leaf, (units, hosts, ports), (0, 1, port_axis), self._cable),
            *both_ways(leaf, "spine{1}", (units, self._spines, ports), (0, 1, port_axis), self._cable),
        ]

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:
        """Over the leaf if both ports are on one, otherwise over the spine that the target gives."""
        hops: list[Hop] = [(0, (*source, leaves)), (1, (*target, arrives))]
        if (source[0], leaves) == (target[0], arrives):
            return hops
        spine = target[1] % self._spines
        return [hops[0], (2, (source[0], spine, leaves)), (3, (target[0], spine, arrives)), hops[1]]


class Torus(Fixed):
    """Hosts on a grid that closes in each dimension; routes follow the dimensions in order, the shorter way.

    In a dimension of two there is one cable between the two; one that goes half way round goes up. A cable in
    half duplex is one link, that of its lower end.
    """

    def __init__(self, sizes: tuple[int, ...], cable: Cable) -> None:
        names = "xyzuvw"
        self.axes = tuple(
            Axis(names[n] if len(sizes) <= len(names) else f"d{n}", size, "cyclic")
            for n, size in enumerate(sizes)
        )
        self._sizes = sizes
        self._cable = cable
        self._half = cable.duplex == HALF
        directions = (1,) if self._half else (1, -1)
        self._ways = [(n, by) for n, size in enumerate(sizes) for by in directions[: size - 1]]
        """Dimension and direction of each family."""

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:  # noqa: ARG002
        """Two links per host and dimension, up and down; in half duplex one."""
        axes = tuple(range(len(self._sizes)))
        found = []
        for number, by in self._ways:
            sizes = list(self._sizes)
            if self._half and sizes[number] == 2:
                sizes[number] = 1  # the one cable belongs to both
            target = _beside(host, self._sizes, number, by)
            found.append(Family(host.format, target, tuple(sizes), axes, *self._cable))
        return found

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:  # noqa: ARG002
        """Dimension by dimension."""
        here, hops = list(source), []
        for number, size in enumerate(self._sizes):
            distance = (target[number] - here[number]) % size
            by = 1 if 2 * distance <= size else -1
            for _ in range(distance if by > 0 else size - distance):
                there = [*here[:number], (here[number] + by) % size, *here[number + 1 :]]
                hops.append(self._hop(number, by, here, there))
                here = there
        return hops

    def _hop(self, number: int, by: int, here: list[int], there: list[int]) -> Hop:
        if not self._half:
            return self._ways.index((number, by)), tuple(here)
        low = list(here if by > 0 else there)
        if self._sizes[number] == 2:
            low[number] = 0
        return self._ways.index((number, 1)), tuple(low)


class FullMesh(Fixed):
    """A cable between every two hosts. In half duplex it is one link, counted from its nearer end.

    Example: of 6 hosts in half duplex, 3 and 1 share link (1, 2 places on), 4 and 1 the opposites' link 1.
    """

    def __init__(self, hosts: int, cable: Cable) -> None:
        self.axes = (Axis("host", hosts, "cyclic"),)
        self._cable = cable

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:  # noqa: ARG002
        """From each host to the one `d + 1` places on; in half duplex half of them, and opposite hosts."""
        hosts = self.axes[0].size

        def target(source: int, distance: int) -> str:
            return host.format((source + distance + 1) % hosts)

        def opposite(source: int) -> str:
            return host.format(source + hosts // 2)

        if self._cable.duplex != HALF:
            return [Family(host.format, target, (hosts, hosts - 1), (0, -1), *self._cable)]
        found = [Family(host.format, target, (hosts, (hosts - 1) // 2), (0, -1), *self._cable)]
        if hosts % 2 == 0:
            found.append(Family(host.format, opposite, (hosts // 2,), (0,), *self._cable))
        return found

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:  # noqa: ARG002
        """The one cable."""
        hosts = self.axes[0].size
        distance = (target[0] - source[0]) % hosts
        if self._cable.duplex != HALF or 2 * distance < hosts:
            return [(0, (source[0], distance - 1))]
        if 2 * distance == hosts:
            return [(1, (source[0] % distance,))]
        return [(0, (target[0], hosts - distance - 1))]


class Dragonfly(Fixed):
    """Groups of routers, a cable between every two routers of a group and between every two groups.

    Each of `routers` routers has `hosts` hosts and `cables` cables to other groups; there are
    routers * cables + 1 groups. Routes are minimal: at most one cable between groups.

    Source: Kim, Dally, Scott, Abts, ISCA 2008; the cables between groups go to relative numbers.
    """

    def __init__(self, routers: int, hosts: int, cables: int, cable: Cable, between: Cable) -> None:
        groups = routers * cables + 1
        self.axes = (
            Axis("group", groups, "cyclic"),
            Axis("router", routers, "fixed"),
            Axis("slot", hosts, "symmetric"),
        )
        self._cables = cables
        self._cable, self._between = cable, between

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:
        """Host to router and back, router to router of a group, group to group."""
        groups, routers, hosts = (axis.size for axis in self.axes)
        cables = self._cables
        router = "router{0}-{1}"
        sizes, axes = (groups, routers, hosts, ports), (0, -1, 2, port_axis)

        def beside(group: int, source: int, distance: int) -> str:
            return router.format(group, (source + distance + 1) % routers)

        def beyond(group: int, source: int, cable: int) -> str:
            distance = source * cables + cable
            return router.format((group + distance + 1) % groups, (groups - distance - 2) // cables)

        return [
            *both_ways(f"{host}.nic{{3}}", router, sizes, axes, self._cable),
            Family(router.format, beside, (groups, routers, routers - 1), (0, -1, -1), *self._cable),
            Family(router.format, beyond, (groups, routers, cables), (0, -1, -1), *self._between),
        ]

    def path(self, source: Where, leaves: int, target: Where, arrives: int) -> list[Hop]:
        """Router, at most one cable to another group, router."""
        groups, routers = self.axes[0].size, self.axes[1].size
        hops: list[Hop] = [(0, (*source, leaves))]
        group, router = source[:2]
        if group != target[0]:
            distance = (target[0] - group) % groups - 1
            leaving, cable = divmod(distance, self._cables)
            if router != leaving:
                hops.append((2, (group, router, (leaving - router) % routers - 1)))
            hops.append((3, (group, leaving, cable)))
            group, router = target[0], (groups - distance - 2) // self._cables
        if router != target[1]:
            hops.append((2, (group, router, (target[1] - router) % routers - 1)))
        return [*hops, (1, (*target, arrives))]


def _beside(host: str, sizes: Where, axis: int, by: int) -> Callable[..., str]:
    """The name of the host that is `by` further along an axis."""

    def name(*where: int) -> str:
        moved = (
            (digit + by) % size if number == axis else digit
            for number, (digit, size) in enumerate(zip(where, sizes, strict=True))
        )
        return host.format(*moved)

    return name
