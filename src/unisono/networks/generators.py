"""Networks by their usual names. Latencies in seconds, rates in bytes per second each way.

    two_hosts(ranks=4)                 two hosts on one cable
    star(hosts, ranks=8)               hosts on one switch that never blocks
    ring(8), torus(4, 8)               hosts on a grid that closes
    full_mesh(8)                       a cable between every two
    fat_tree(8, oversubscription=2)    three levels of switches with 8 ports
    rail_optimised(2, 32)              port i of every host on leaf i
    dragonfly(4, 2, 2)                 groups of routers, all connected
    dgx(4)                             hosts of eight GPUs on a switch

Keyword arguments of all: `cable`, and the attributes of `Hosts`: `ranks`, `inside`, `nics`, `costs` ...
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.engine.base.validation import instance, not_negative, positive, whole
from unisono.networks.costs import Costs
from unisono.networks.fabric import Cable, Fabric, Interior, MemoryInterior, SwitchInterior, assemble
from unisono.networks.fabrics import Crossbar, Dragonfly, FatTree, FullMesh, RailOptimised, Torus
from unisono.networks.network import HALF, Network

__all__ = [
    "Hosts",
    "dgx",
    "dragonfly",
    "fat_tree",
    "full_mesh",
    "rail_optimised",
    "ring",
    "star",
    "torus",
    "two_hosts",
]

MOST_RANKS = 1 << 20

ETHERNET = Cable(5e-6, 12.5e9)  # 100 Gbit/s
MEMORY = Cable(3e-7, 40e9)
NVSWITCH = Cable(5e-7, 450e9)  # fourth generation, H100: 18 links of 25 GB/s each way
INFINIBAND = Cable(1e-6, 50e9)  # NDR, 400 Gbit/s

CPU = Costs(o_send_s=1e-6, o_recv_s=1e-6, reduce_s_per_byte=1e-10, copy_s_per_byte=1e-10)
GPU = Costs(o_send_s=1e-6, o_recv_s=1e-6, reduce_s_per_byte=1e-12, copy_s_per_byte=1e-12)


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts of a network have.

    Attributes:
        ranks: per host.
        inside: how the ranks of a host reach each other: "memory" shares one rate; "switch" has a cable for
            each rank.
        inner: the cable of that.
        nics: ports of a host to the fabric; each of the fabric's rate.
        costs: of its ranks.  cores: 0: one for each rank.
        shared_cores: of the machine, where the hosts are containers or namespaces of one; 0: they are not.
        memory_bytes_per_s: of all cores together; 0: no limit.
    """

    ranks: int = 1
    inside: str = "memory"
    inner: Cable = MEMORY
    nics: int = 1
    costs: Costs = CPU
    cores: int = 0
    shared_cores: int = 0
    memory_bytes_per_s: float = 0.0

    def interior(self) -> Interior:
        """The interior of a host.

        Raises:
            ValueError: a number is out of range, or a rate is not above 0.
        """
        ranks = whole(self.ranks, "ranks per host", 1, 1 << 16)
        nics = whole(self.nics, "nics", 1, ranks)
        check_cable(self.inner, "the cable inside")
        if self.inside == "memory":
            return MemoryInterior(ranks, self.inner, nics)
        if self.inside == "switch":
            return SwitchInterior(ranks, self.inner, nics)
        raise ValueError(f"inside is {self.inside!r}, expected 'memory' or 'switch'")


def two_hosts(*, cable: Cable = ETHERNET, **hosts: Any) -> Network:
    """Two hosts on one cable.

    Example: two_hosts(ranks=2) has ranks 0, 1 on host 0 and 2, 3 on host 1; all messages between the hosts
    share the cable, each way.
    """
    return _network("two_hosts", FullMesh(2, check_cable(cable)), hosts)


def star(
    hosts: int, *, cable: Cable = ETHERNET, adds_bytes_per_s: float | None = None, **each: Any
) -> Network:
    """Hosts on one switch that never blocks: a message shares only the ports of its hosts.

    adds_bytes_per_s: the switch adds at this rate, 0 at that of its links; None: it does not add.
    """
    if adds_bytes_per_s:
        positive(adds_bytes_per_s, "adds_bytes_per_s")
    fabric = Crossbar(_count(hosts, "hosts"), check_cable(cable), adds_bytes_per_s)
    return _network(f"star({hosts})", fabric, each)


def ring(hosts: int, *, cable: Cable = ETHERNET, **each: Any) -> Network:
    """Hosts in a circle, each with a cable to the next."""
    return _network(f"ring({hosts})", Torus((_count(hosts, "hosts"),), check_cable(cable)), each)


def torus(*sizes: int, cable: Cable = ETHERNET, **each: Any) -> Network:
    """Hosts on a grid that closes in each dimension.

    Example: torus(4, 8) has 32 hosts; host 9 is at (1, 1), beside 1, 8, 10 and 17.
    """
    if not 1 <= len(sizes) <= 6:
        raise ValueError(f"torus: got {len(sizes)} dimensions, expected 1 to 6")
    checked = tuple(_count(size, "a dimension") for size in sizes)
    return _network(f"torus{checked}", Torus(checked, check_cable(cable)), each)


def full_mesh(hosts: int, *, cable: Cable = ETHERNET, **each: Any) -> Network:
    """A cable between every two hosts."""
    return _network(f"full_mesh({hosts})", FullMesh(_count(hosts, "hosts", 2), check_cable(cable)), each)


def fat_tree(k: int, *, oversubscription: int = 1, cable: Cable = ETHERNET, **each: Any) -> Network:
    """Three levels of switches with k ports, k**3 / 4 hosts.

    Args:
        oversubscription: hosts of an edge switch per link upwards; it divides k / 2.
    Example: fat_tree(4) has 16 hosts; fat_tree(4, oversubscription=2) has one way up per edge switch.
    """
    k = whole(k, "k", 2, 200)
    if k % 2:
        raise ValueError(f"k is {k}, expected an even number of ports")
    over = whole(oversubscription, "oversubscription", 1, k // 2)
    if k // 2 % over:
        raise ValueError(f"oversubscription is {over}, which does not divide k/2 = {k // 2}")
    suffix = f", oversubscription={over}" if over > 1 else ""
    return _network(f"fat_tree({k}{suffix})", FatTree(k, over, check_cable(cable)), each)


def rail_optimised(
    units: int,
    hosts: int = 32,
    *,
    spines: int = 0,
    crossing: bool = False,
    cable: Cable = INFINIBAND,
    **each: Any,
) -> Network:
    """Units of hosts: port i of each host of a unit is on one leaf switch, and spines connect all leaves.

    Args:
        spines: per leaf, one link to each; 0: as many as hosts, so that nothing blocks.
        crossing: a message leaves by its sender's port and crosses a spine to its receiver's; False: it first
            goes within the host to the port on the receiver's rail (NCCL's PXN).
    """
    units, hosts = _count(units, "units"), _count(hosts, "hosts")
    spines = whole(spines, "spines", 0, 1 << 12) or hosts
    fabric = RailOptimised(units, hosts, spines, check_cable(cable), crossing=crossing)
    return _network(f"rail_optimised({units}, {hosts})", fabric, _gpus(each))


def dragonfly(
    routers: int,
    hosts: int,
    cables: int,
    *,
    cable: Cable = ETHERNET,
    between: Cable | None = None,
    **each: Any,
) -> Network:
    """Groups of routers: every two routers of a group and every two groups share a cable.

    Args:
        routers: per group.  hosts: per router.  cables: to other groups, per router.
        between: the cables between groups; None: as all others.
    Example: dragonfly(4, 2, 2) has 9 groups of 8 hosts.
    """
    routers, hosts, cables = _count(routers, "routers", 2), _count(hosts, "hosts"), _count(cables, "cables")
    for each_cable, what in ((cable, "cable"), (between or cable, "between")):
        if check_cable(each_cable).duplex == HALF:
            raise ValueError(f"{what}: the cables of a dragonfly are full duplex")
    fabric = Dragonfly(routers, hosts, cables, check_cable(cable), check_cable(between or cable))
    return _network(f"dragonfly({routers}, {hosts}, {cables})", fabric, each)


def dgx(hosts: int = 1, *, cable: Cable = INFINIBAND, **each: Any) -> Network:
    """Hosts of eight GPUs on NVSwitches, with a port for each GPU; equal ports are on one switch.

    The figures are those of a DGX H100; for an A100 give inner=Cable(5e-7, 300e9), cable=Cable(1e-6, 25e9).
    """
    fabric = RailOptimised(1, _count(hosts, "hosts"), 1, check_cable(cable), crossing=False)
    return _network(f"dgx({hosts})", fabric, _gpus(each))


def check_cable(cable: Cable, name: str = "the cable") -> Cable:
    """The cable with plain floats.

    Raises:
        ValueError: a latency or a burst below 0, a rate that is not above 0, an unknown duplex.
        TypeError: it is no Cable.
    """
    cable = instance(cable, Cable, name)
    latency = positive(cable.latency_s, f"the latency of {name}") if cable.latency_s != 0 else 0.0
    rate = positive(cable.bytes_per_s, f"the rate of {name}")
    if cable.duplex not in ("full", "half"):
        raise ValueError(f"the duplex of {name} is {cable.duplex!r}, expected 'full' or 'half'")
    return Cable(latency, rate, cable.duplex, not_negative(cable.burst_bytes, f"the burst of {name}"))


def _gpus(each: dict[str, Any]) -> dict[str, Any]:
    gpus = {"ranks": 8, "inside": "switch", "inner": NVSWITCH, "costs": GPU}
    gpus["nics"] = each.get("ranks", 8)
    return {**gpus, **each}


def _count(value: int, name: str, least: int = 1) -> int:
    return whole(value, name, least, MOST_RANKS)


def _network(name: str, fabric: Fabric, each: dict[str, Any]) -> Network:
    try:
        hosts = Hosts(**each)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    size = hosts.ranks
    for axis in fabric.axes:
        size *= axis.size
    whole(size, f"{name}: the number of ranks", 1, MOST_RANKS)
    return assemble(
        name,
        hosts.interior(),
        fabric,
        costs=hosts.costs,
        cores=hosts.cores,
        shared_cores=whole(hosts.shared_cores, f"{name}: shared_cores", 0, MOST_RANKS),
        memory_bytes_per_s=hosts.memory_bytes_per_s,
    )
