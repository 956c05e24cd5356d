"""Hosts of one kind on a fabric: the families of their links, and the routes through both.

An *interior* is what lies within a host: its local ranks, and the way from each to the ports of the host.
A *fabric* connects equal ports of all hosts. A route between hosts leaves by a port and arrives at a port.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from unisono.networks.costs import Costs
from unisono.networks.network import (
    HALF,
    Axis,
    Family,
    Links,
    Machine,
    Network,
    Switch,
    Symmetry,
    numbered,
    split,
)

__all__ = ["Cable", "Fabric", "Hop", "Interior", "MemoryInterior", "SwitchInterior", "assemble", "both_ways"]

Hop = tuple[int, tuple[int, ...]]
"""A family, by its position in `families`, and the coordinates of the link."""


class Cable(NamedTuple):
    """Latency in seconds, bytes per second each way, "full" or "half" duplex.

    burst_bytes: each way is a token bucket, as traffic shapers are: after a pause it passes so many at once.
    """

    latency_s: float
    bytes_per_s: float
    duplex: str = "full"
    burst_bytes: float = 0.0


def both_ways(
    source: str, target: str, sizes: tuple[int, ...], axes: tuple[int, ...], cable: Cable
) -> list[Family]:
    """The links of cables: the ways there, and the ways back. source, target: formats of the coordinates."""
    there = Family(source.format, target.format, sizes, axes, *cable)
    return [there, there._replace(source=there.target, target=there.source, back=True)]


class Interior(Protocol):
    """What lies within a host of `ranks` ranks. A link has the coordinates of its host, then its own."""

    ranks: int
    ports: int
    kind: str  # of the axis of local ranks

    def families(self, host: str, sizes: tuple[int, ...]) -> list[Family]:
        """The links within all hosts, without numbers; `host` is the format of a host's name."""

    def inside(self, source: int, target: int) -> list[Hop]:
        """From a local rank to another; the coordinates without those of the host."""

    def up(self, source: int, port: int) -> list[Hop]:
        """From a local rank to a port."""

    def down(self, port: int, target: int) -> list[Hop]:
        """From a port to a local rank."""

    def port(self, rank: int) -> int:
        """The nearest port of a local rank."""


class Fabric(Protocol):
    """Connects hosts, which have the coordinates `axes`.

    Attributes:
        axes: of hosts, the most significant first.  count: the number of hosts, the product of their sizes.
        planes: the ports of a host are not connected with each other: a route arrives at the port it left by.
    """

    axes: tuple[Axis, ...]
    planes: bool

    def families(self, host: str, ports: int, port_axis: int) -> list[Family]:
        """The links between hosts, without numbers.

        Args:
            host: the format of a host's name.  ports: of a host.
            port_axis: the axis that shifts the number of a port; -1: none.
        """

    def path(self, source: tuple[int, ...], leaves: int, target: tuple[int, ...], arrives: int) -> list[Hop]:
        """From a port of a host to a port of another, by the coordinates of the hosts."""

    def switches(self) -> tuple[Switch, ...]:
        """Those that add."""

    def to_switch(self, source: tuple[int, ...], port: int, switch: int) -> list[Hop]:
        """From a host to a switch that adds."""

    def from_switch(self, switch: int, target: tuple[int, ...], port: int) -> list[Hop]:
        """From a switch that adds to a host."""


class MemoryInterior:
    """Ranks that share the memory of their host: one link that all messages within the host cross.

    Hosts have `ports` ports; local rank r uses port r % ports.
    """

    kind = "symmetric"

    def __init__(self, ranks: int, memory: Cable, ports: int = 1) -> None:
        self.ranks, self.ports = ranks, ports
        self._memory = memory
        self.kind = "symmetric" if ports == 1 else "fixed"

    def families(self, host: str, sizes: tuple[int, ...]) -> list[Family]:
        """One link per host; a rank alone needs none."""
        if self.ranks == 1:
            return []
        axes = tuple(range(len(sizes)))
        memory = self._memory
        ends = f"{host}.ranks".format, f"{host}.memory".format
        return [Family(*ends, sizes, axes, memory.latency_s, memory.bytes_per_s, HALF)]

    def inside(self, source: int, target: int) -> list[Hop]:  # noqa: ARG002
        """The memory."""
        return [(0, ())]

    def up(self, source: int, port: int) -> list[Hop]:  # noqa: ARG002
        """Nothing: the card reads the memory by itself."""
        return []

    def down(self, port: int, target: int) -> list[Hop]:  # noqa: ARG002
        """Nothing."""
        return []

    def port(self, rank: int) -> int:
        """Ranks are dealt out to the ports."""
        return rank % self.ports


class SwitchInterior:
    """Ranks on a switch within their host, such as GPUs on NVSwitches; each has a way of its own to a port.

    A message to a port of another rank goes over the switch to that rank's side, as NCCL's PXN does.
    """

    def __init__(
        self, ranks: int, cable: Cable, ports: int = 1, adds_bytes_per_s: float | None = None
    ) -> None:
        self.ranks, self.ports = ranks, ports
        self._cable = cable
        self.adds_bytes_per_s = adds_bytes_per_s
        self.kind = "symmetric" if ports == 1 else "cyclic" if ports == ranks else "fixed"

    def families(self, host: str, sizes: tuple[int, ...]) -> list[Family]:
        """A link to the switch and one back for each rank."""
        axes = tuple(range(len(sizes) + 1))
        gpu, switch = f"{host}.gpu{{{len(sizes)}}}", f"{host}.switch"
        return both_ways(gpu, switch, (*sizes, self.ranks), axes, self._cable)

    def inside(self, source: int, target: int) -> list[Hop]:
        """Up and down."""
        return [(0, (source,)), (1, (target,))]

    def up(self, source: int, port: int) -> list[Hop]:
        """Over the switch if the port is another rank's."""
        beside = self._beside(source, port)
        return self.inside(source, beside) if beside != source else []

    def down(self, port: int, target: int) -> list[Hop]:
        """Over the switch if the port is another rank's."""
        beside = self._beside(target, port)
        return self.inside(beside, target) if beside != target else []

    def _beside(self, rank: int, port: int) -> int:
        """The rank at whose side a port is: the rank itself, where it is one of several."""
        each = max(1, self.ranks // self.ports)
        return rank if rank // each % self.ports == port else min(port * each, self.ranks - 1)

    def port(self, rank: int) -> int:
        """Neighbours share a port where there are fewer ports than ranks."""
        return rank // max(1, self.ranks // self.ports) % self.ports


class _FabricRouter:
    """Routes of `assemble`."""

    def __init__(
        self, interior: Interior, fabric: Fabric, inner: tuple[Family, ...], outer: tuple[Family, ...]
    ) -> None:
        self._interior, self._fabric = interior, fabric
        self._inner, self._outer = inner, outer
        self._sizes = tuple(axis.size for axis in fabric.axes)

    def path(self, source: int, target: int) -> tuple[int, ...]:
        interior, fabric = self._interior, self._fabric
        host, local = divmod(source, interior.ranks)
        other, remote = divmod(target, interior.ranks)
        here, there = split(host, self._sizes), split(other, self._sizes)
        if host == other:
            return self._within(here, interior.inside(local, remote))
        leaves, arrives = interior.port(local), interior.port(remote)
        if fabric.planes:
            leaves = arrives
        return (
            *self._within(here, interior.up(local, leaves)),
            *self._between(fabric.path(here, leaves, there, arrives)),
            *self._within(there, interior.down(arrives, remote)),
        )

    def to_switch(self, source: int, switch: int) -> tuple[int, ...]:
        host, local = divmod(source, self._interior.ranks)
        here, port = split(host, self._sizes), self._interior.port(local)
        up = self._within(here, self._interior.up(local, port))
        return up + self._between(self._fabric.to_switch(here, port, switch))

    def from_switch(self, switch: int, target: int) -> tuple[int, ...]:
        host, local = divmod(target, self._interior.ranks)
        there, port = split(host, self._sizes), self._interior.port(local)
        down = self._within(there, self._interior.down(port, local))
        return self._between(self._fabric.from_switch(switch, there, port)) + down

    def _within(self, host: tuple[int, ...], hops: Sequence[Hop]) -> tuple[int, ...]:
        return tuple(self._inner[family].at(*host, *coordinates) for family, coordinates in hops)

    def _between(self, hops: Sequence[Hop]) -> tuple[int, ...]:
        return tuple(self._outer[family].at(*coordinates) for family, coordinates in hops)


def assemble(
    name: str,
    interior: Interior,
    fabric: Fabric,
    *,
    costs: Costs = Costs(),  # noqa: B008  # frozen
    cores: int = 0,
    shared_cores: int = 0,
    memory_bytes_per_s: float = 0.0,
    local_axis: str = "rank",
) -> Network:
    """The network of equal hosts on a fabric.

    Raises:
        ValueError: a rate or a number is not above 0.
    """
    sizes = tuple(axis.size for axis in fabric.axes)
    host = "host" + "-".join(f"{{{number}}}" for number in range(len(sizes)))
    port_axis = len(sizes) if interior.ports == interior.ranks > 1 else -1
    inner, outer = interior.families(host, sizes), fabric.families(host, interior.ports, port_axis)
    families = numbered([*outer, *inner])
    count = math.prod(sizes)
    axes = (*fabric.axes, Axis(local_axis, interior.ranks, interior.kind))
    outer_part, inner_part = families[: len(outer)], families[len(outer) :]
    router = _FabricRouter(interior, fabric, inner_part, outer_part)
    return Network(
        name=name,
        size=count * interior.ranks,
        hosts=tuple(number for number in range(count) for _ in range(interior.ranks)),
        machines=[Machine(host.format(*split(n, sizes)), cores, memory_bytes_per_s) for n in range(count)],
        links=Links(families),
        router=router,
        costs=(costs,),
        switches=fabric.switches(),
        symmetry=Symmetry(axes, families),
        shared_cores=shared_cores,
    )
