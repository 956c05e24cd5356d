"""NCCL's topology of a host, as NCCL_TOPO_DUMP_FILE writes it: GPUs, NVLinks, PCI switches, CPUs, cards.

Each GPU is a rank. NVLinks are cables; those to NVSwitches end at one switch. The rest is the tree of PCI
below each CPU, and cables between the CPUs. The rates are those that NCCL takes, the latencies estimates.

Source: NCCL 2.27, src/graph/topo.h and topo.cc, its constants of bandwidth.
"""

from __future__ import annotations

from pathlib import Path

from unisono.engine.encoding.xml_reader import Element, read
from unisono.networks.fabric import Cable
from unisono.networks.generators import GPU
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.networks.network import Machine, Network

__all__ = ["network_of_system", "read_nccl"]

NVLINK = {60: 18e9, 70: 20e9, 80: 20e9, 86: 12e9, 90: 20.6e9, 100: 40.1e9}
"""Bytes per second of one NVLink each way, from this compute capability on."""

PCI_LANE = {2.5: 0.1875e9, 5.0: 0.375e9, 8.0: 0.75e9, 16.0: 1.5e9, 32.0: 3e9, 64.0: 6e9}
"""Bytes per second of a lane, by gigatransfers per second."""

BETWEEN_CPUS = {"arm64": 6e9, "ppc64": 32e9}
BETWEEN_X86 = {"AuthenticAMD": 16e9, "CentaurHauls": 6e9, "  Shanghai  ": 6e9}
BETWEEN_INTEL = {0xCF: 40e9, 0x8F: 22e9, 0x55: 10e9, 0: 6e9}
"""Of family 6 from this model on; other families have the last one."""

YONGFENG, YONGFENG_CPUS = (7, 0x5B), 9e9
OTHER_CPUS = 10e9  # a file without a vendor

NVLINK_S, PCI_S, CPU_S = 0.7e-6, 0.3e-6, 0.5e-6

MOST_CPUS = 1 << 10
"""All of them are connected."""

GPU_CLASS, SWITCH_CLASS, CPU_CLASS = "0x03", "0x068000", "0x068001"


def read_nccl(file: str | Path) -> Network:
    """The network of the GPUs in a file.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the line.
    """
    return network_of_system(read(file, "system"), Path(file).stem)


def network_of_system(system: Element, name: str = "system") -> Network:
    """As `read_nccl`, from the element <system>."""
    found = _System(system)
    for cpu in system.all("cpu"):
        found.cpu(cpu)
    return found.network(name)


def _between(cpu: Element) -> float:
    """Bytes per second between a CPU and another one of its host."""
    arch, vendor = cpu.text("arch", ""), cpu.text("vendor", "")
    model = cpu.whole("familyid", 0, 1 << 16, 0), cpu.whole("modelid", 0, 1 << 16, 0)
    if arch in BETWEEN_CPUS:
        return BETWEEN_CPUS[arch]
    if vendor == "GenuineIntel":
        return next(rate for first, rate in BETWEEN_INTEL.items() if first <= model[1] * (model[0] == 6))
    return YONGFENG_CPUS if model == YONGFENG else BETWEEN_X86.get(vendor, OTHER_CPUS)


class _System:
    def __init__(self, system: Element) -> None:
        self.system = system
        self.connections: list[Connection] = []
        self.cpus: list[str] = []
        self.gpus: dict[str, tuple[int, Element, str]] = {}  # node -> rank, its element, address on the bus
        self.cpu_of: dict[str, str] = {}  # of each GPU

    def cpu(self, cpu: Element) -> None:
        node = f"cpu{cpu.whole('numaid', -1, MOST_CPUS - 1, len(self.cpus))}"
        if node in self.cpus:
            raise cpu.error("has the numaid of another one")
        for other in self.cpus:
            self.connections.append(Connection((other, node), Cable(CPU_S, _between(cpu))))
        self.cpus.append(node)
        for pci in cpu.all("pci"):
            self.pci(pci, node)

    def pci(self, pci: Element, above: str) -> None:
        address = pci.text("busid")
        gpus = list(pci.all("gpu"))
        node = f"gpu{gpus[0].whole('dev', 0, 1 << 10)}" if gpus else f"pci{address}"
        if node in self.gpus:
            raise pci.error(f"{node} stands there twice")
        self.connections.append(Connection((above, node), Cable(PCI_S, self.rate(pci))))
        if gpus:
            rank = gpus[0].whole("rank", 0, 1 << 16, gpus[0].whole("dev", 0, 1 << 10))
            self.gpus[node] = (rank, gpus[0], address.lower())
            self.cpu_of[node] = self.cpus[-1]
        for child in pci.all("pci"):
            self.pci(child, node)
        for nic in pci.all("nic"):
            for net in nic.all("net"):
                speed = net.whole("speed", 1, 1 << 40, 10_000)  # Mbit/s
                end = f"net{net.whole('dev', 0, 1 << 10)}"
                self.connections.append(Connection((node, end), Cable(PCI_S, speed * 1e6 / 8)))

    def rate(self, pci: Element) -> float:
        text = pci.text("link_speed", "")
        speed = text.replace("PCIe", "").replace("GT/s", "").strip()
        width = pci.whole("link_width", 0, 64, 16) or 16
        if not speed:
            return PCI_LANE[8.0] * width
        try:
            lane = PCI_LANE[float(speed)]
        except (KeyError, ValueError):
            raise pci.error(f"link_speed is {text[:40]!r}, expected such as '16.0 GT/s'") from None
        return lane * width

    def nvlinks(self) -> None:
        by_address = {address: node for node, (_, _, address) in self.gpus.items()}
        pairs: dict[tuple[str, str], float] = {}
        for node, (_, gpu, _) in self.gpus.items():
            capability = gpu.whole("sm", 0, 1000, 0)
            each = next((rate for sm, rate in sorted(NVLINK.items(), reverse=True) if capability >= sm), 18e9)
            for link in gpu.all("nvlink"):
                rate = each * link.whole("count", 1, 64, 1)
                kind = link.text("tclass", GPU_CLASS)
                other = by_address.get(link.text("target", "").lower())
                if kind.startswith(SWITCH_CLASS):
                    pairs[node, "nvswitch"] = pairs.get((node, "nvswitch"), 0) + rate
                elif kind.startswith(GPU_CLASS):
                    if other is None:
                        raise link.error(f"there is no GPU at {link.text('target', '')[:40]!r}")
                    if node < other:
                        pairs[node, other] = pairs.get((node, other), 0) + rate
                elif kind.startswith(CPU_CLASS):
                    pairs[node, self.cpu_of[node]] = pairs.get((node, self.cpu_of[node]), 0) + rate
                else:
                    expected = f"{GPU_CLASS}..., {SWITCH_CLASS} or {CPU_CLASS}"
                    raise link.error(f"tclass is {kind[:40]!r}, expected {expected}")
        # Of two cables between a GPU and its CPU NCCL takes the NVLinks.
        self.connections = [one for one in self.connections if one.ends[::-1] not in pairs]
        for ends, rate in pairs.items():
            self.connections.append(Connection(ends, Cable(NVLINK_S, rate)))

    def network(self, name: str) -> Network:
        if not self.gpus:
            raise self.system.error("has no <gpu>")
        self.nvlinks()
        ranks = sorted((rank, node) for node, (rank, _, _) in self.gpus.items())
        if len({rank for rank, _ in ranks}) < len(ranks):
            raise self.system.error("two GPUs have the same rank")
        places = [RankLocation(node, 0) for _, node in ranks]
        return network_of(name, places, self.connections, [Machine(name, 0, 0.0)], memories={}, costs=(GPU,))
