"""hwloc's XML of a host (lstopo --of xml): its GPUs with their way over PCI, or else its cores and memories.

With GPUs (OSDev objects of cuda, opencl, rsmi, nvml ...), each is a rank; PCI links have the file's speed.
Without, each core is a rank: those of a NUMA node share its memory, and all NUMA nodes are connected.

hwloc knows no rates of memories and between NUMA nodes. They are estimates, as are all latencies. Matrices of
distances, such as NVLinkBandwidth, are not read.  Source: hwloc 2's hwloc2.dtd.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from unisono.engine.encoding.xml_reader import Element, read
from unisono.networks.fabric import Cable
from unisono.networks.generators import CPU, GPU
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.networks.network import Machine, Network

__all__ = ["network_of_topology", "read_hwloc"]

MOST_NODES = 1 << 10
"""NUMA nodes of a host: all of them are connected."""

MEMORY = Cable(3e-7, 40e9)
BETWEEN = Cable(5e-7, 20e9)
PCI_S, UNKNOWN_PCI = 3e-7, 64e9  # a bridge of the host has no speed of its own
GPUS = re.compile(r"(cuda|opencl\d+d|rsmi|nvml|ze)\d+")


def read_hwloc(file: str | Path) -> Network:
    """The network of the GPUs or cores in a file.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the line.
    """
    return network_of_topology(read(file, "topology"), Path(file).stem)


def network_of_topology(topology: Element, name: str = "host") -> Network:
    """As `read_hwloc`, from the element <topology>."""
    found = _Topology()
    for each in topology.all("object"):
        found.walk(each, "")
    if found.gpus:
        places = [RankLocation(node, 0) for node in found.gpus]
        cables = [*found.connections, *found.between()]
        return network_of(name, places, cables, [Machine(name, 0, 0.0)], memories={}, costs=(GPU,))
    if not found.cores:
        raise topology.error("has no Core and no PU")
    places = [RankLocation(node, 0) for node in found.cores]
    shared = {node: MEMORY for node, count in Counter(found.cores).items() if count > 1}
    machine = Machine(name, len(found.cores), MEMORY.bytes_per_s * len(found.nodes))
    return network_of(name, places, found.between(), [machine], memories=shared, costs=(CPU,))


class _Topology:
    """What was found.

    Attributes:
        nodes: the NUMA nodes, at least one.  cores: the NUMA node of each core.  gpus: their nodes.
    """

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.cores: list[str] = []
        self.gpus: list[str] = []
        self.connections: list[Connection] = []

    def between(self) -> list[Connection]:
        """Cables between all NUMA nodes."""
        return [
            Connection((one, other), BETWEEN)
            for at, one in enumerate(self.nodes)
            for other in self.nodes[at + 1 :]
        ]

    def node(self, element: Element) -> str:
        """Note a NUMA node."""
        name = f"numa{element.whole('os_index', 0, MOST_NODES - 1, len(self.nodes))}"
        if name not in self.nodes:
            self.nodes.append(name)
        return name

    def walk(self, element: Element, memory: str) -> None:
        """Visit an object and those in it. memory: the NUMA node that is nearest."""
        kind = element.text("type")
        for child in element.all("object"):
            if child.text("type") == "NUMANode":
                memory = self.node(child)
        if kind == "NUMANode" and list(element.all("object")):  # hwloc 1: cores lie within
            memory = self.node(element)
        if kind == "Core" or (kind == "PU" and not memory.startswith("core")):
            memory = memory or self._first()
            self.cores.append(memory)
            return
        for child in element.all("object"):
            if child.text("type") in ("Bridge", "PCIDev"):
                self.device(child, memory or self._first())
            elif child.text("type") != "NUMANode" or list(child.all("object")):
                self.walk(child, memory)

    def _first(self) -> str:
        if not self.nodes:
            self.nodes.append("numa0")
        return self.nodes[0]

    def device(self, element: Element, above: str) -> None:
        """A bridge or a device of PCI, and what lies below it."""
        name = f"{element.text('type').lower()}{element.text('pci_busid', str(element.line))}"
        names = [child.text("name", "") for child in element.all("object") if child.text("type") == "OSDev"]
        gpu = next((each for each in names if GPUS.fullmatch(each)), "")
        node = gpu or name
        text = element.text("pci_link_speed", "0")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
            raise element.error(f"pci_link_speed is {text[:40]!r}, expected gigabytes per second")
        rate = float(text) * 1e9 or UNKNOWN_PCI
        self.connections.append(Connection((above, node), Cable(PCI_S, rate)))
        if gpu:
            if gpu in self.gpus:
                raise element.error(f"{gpu} stands there twice")
            self.gpus.append(gpu)
        for child in element.all("object"):
            if child.text("type") in ("Bridge", "PCIDev"):
                self.device(child, node)
