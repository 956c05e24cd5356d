"""Networks from elsewhere: NCCL's topology, hwloc, InfraGraph; and link by link as TOML."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from loops import each
from unisono.networks import Cable, Costs
from unisono.networks.description import parse
from unisono.networks.found import find
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.networks.infragraph import network_of_infrastructure
from unisono.networks.network import Machine
from unisono.networks.writer import toml

NCCL = """<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:07:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:0f:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0"><nvlink target="0000:c5:00.0" count="12" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:10:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1"><nvlink target="0000:c5:00.0" count="12" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0" speed="200000"/></nic></pci>
    </pci>
  </cpu>
  <cpu numaid="1" arch="x86_64">
    <pci busid="0000:90:00.0" class="0x030200" link_speed="8 GT/s" link_width="16">
      <gpu dev="2" sm="80" rank="2"/>
    </pci>
  </cpu>
</system>
"""

HWLOC = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0">
    <object type="Package" os_index="0">
      <object type="NUMANode" os_index="0"/>
      <object type="L2Cache"><object type="Core" os_index="0"><object type="PU"/></object></object>
      <object type="L2Cache"><object type="Core" os_index="1"><object type="PU"/></object></object>
    </object>
    <object type="Package" os_index="1">
      <object type="NUMANode" os_index="1"/>
      <object type="Core" os_index="2"><object type="PU" os_index="2"/></object>
    </object>
  </object>
</topology>
"""

PCIE = {"name": "pcie", "physical": {"bandwidth": {"gigabytes_per_second": 16}, "latency": {"ns": 300}}}
SERVER = {
    "name": "server",
    "components": [
        {"name": "xpu", "count": 2, "choice": "xpu"},
        {"name": "nic", "count": 1, "choice": "nic"},
    ],
    "links": [PCIE],
    "edges": [
        {"ep1": {"component": "xpu"}, "ep2": {"component": "nic"}, "scheme": "many2many", "link": "pcie"}
    ],
}
SWITCH = {
    "name": "switch",
    "components": [
        {"name": "port", "count": 4, "choice": "port"},
        {"name": "asic", "count": 1, "choice": "switch"},
    ],
    "links": [{"name": "ic", "physical": {"bandwidth": {"gigabits_per_second": 800}}}],
    "edges": [
        {"ep1": {"component": "port"}, "ep2": {"component": "asic"}, "scheme": "many2many", "link": "ic"}
    ],
}
INFRAGRAPH: dict[str, Any] = {
    "name": "rack",
    "devices": [SERVER, SWITCH],
    "links": [{"name": "eth", "physical": {"bandwidth": {"gigabits_per_second": 100}, "latency": {"us": 1}}}],
    "instances": [
        {"name": "host", "device": "server", "count": 4},
        {"name": "sw", "device": "switch", "count": 1},
    ],
    "edges": [
        {
            "ep1": {"instance": "host[0:4]", "component": "nic[0]"},
            "ep2": {"instance": "sw[0]", "component": "port[0:4]"},
            "scheme": "one2one",
            "link": "eth",
        }
    ],
}


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def names(network: Any, source: int, target: int) -> list[str]:
    return [network.links[link].name for link in network.route(source, target)]


def test_gpus_of_nccl_take_nvlink_where_there_is_one(tmp_path: Path) -> None:
    network = find(written(tmp_path / "t.xml", NCCL))
    assert network.size == 3
    assert names(network, 0, 1) == ["gpu0>nvswitch", "nvswitch>gpu1"]
    assert network.links[network.route(0, 1)[0]].bytes_per_s == 12 * 20e9
    assert names(network, 0, 2) == ["gpu0>pci0000:07:00.0", "pci0000:07:00.0>cpu0", "cpu0>cpu1", "cpu1>gpu2"]
    assert network.links[network.route(0, 2)[-1]].bytes_per_s == 12e9


def a_system(*cpus: tuple[str, str]) -> str:
    """NCCL's file: (attributes of a CPU, what its GPU has) of each."""
    parts = [
        f'<cpu numaid="{at}" {cpu}><pci busid="0000:0{at}:00.0" link_speed="16.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{at}" sm="70" rank="{at}">{links}</gpu></pci></cpu>'
        for at, (cpu, links) in enumerate(cpus)
    ]
    return f'<system version="1">{"".join(parts)}</system>'


def test_nvlinks_to_a_cpu_end_at_the_cpu_of_their_gpu(tmp_path: Path) -> None:
    bridge = '<nvlink target="fffffff:ffff:ff" count="3" tclass="0x068001"/>'
    network = find(written(tmp_path / "t.xml", a_system(*[('arch="ppc64"', bridge)] * 2)))
    names = [network.links[link].name for link in network.route(1, 0)]
    assert names == ["gpu1>cpu1", "cpu1>cpu0", "cpu0>gpu0"]
    rates = {link.name: link.bytes_per_s for link in network.links}
    nvlinks = dict.fromkeys(("gpu0>cpu0", "cpu0>gpu0", "gpu1>cpu1", "cpu1>gpu1"), 60e9)
    assert rates == nvlinks | {"cpu0>cpu1": 32e9, "cpu1>cpu0": 32e9}  # and no PCI beside them
    with pytest.raises(ValueError, match="tclass is '0x0604'"):
        find(written(tmp_path / "t.xml", a_system(('arch="ppc64"', bridge.replace("0x068001", "0x0604")))))


@each(
    "cpu, rate",
    [
        ('arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"', 16e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106"', 10e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"', 40e9),
        ('arch="x86_64" vendor="CentaurHauls" familyid="7" modelid="91"', 9e9),
        ('arch="arm64"', 6e9),
        ('arch="x86_64"', 10e9),
    ],
)
def test_cpus_are_connected_at_the_rate_that_nccl_takes(cpu: str, rate: float, tmp_path: Path) -> None:
    network = find(written(tmp_path / "t.xml", a_system((cpu, ""), (cpu, ""))))
    assert {link.bytes_per_s for link in network.links if link.name in ("cpu0>cpu1", "cpu1>cpu0")} == {rate}


def test_hwlocs_cores_share_the_memory_of_their_node(tmp_path: Path) -> None:
    network = find(written(tmp_path / "t.xml", HWLOC))
    assert network.size == 3
    assert names(network, 0, 1) == ["numa0.ranks=numa0.memory"]
    assert names(network, 0, 2) == ["numa0>numa1"]


def test_infragraph_in_json_and_yaml(tmp_path: Path) -> None:
    network = find(written(tmp_path / "g.json", json.dumps(INFRAGRAPH)))
    assert (network.size, network.name, list(network.hosts)) == (8, "rack", [0, 0, 1, 1, 2, 2, 3, 3])
    assert names(network, 0, 7)[1:3] == ["host.0.nic.0>sw.0.port.0", "sw.0.port.0>sw.0.asic.0"]
    yaml = pytest.importorskip("yaml")
    same = find(written(tmp_path / "g.yaml", yaml.safe_dump(INFRAGRAPH)))
    assert list(same.links) == list(network.links)


@each(
    "change, says",
    [
        (("instances", [{"name": "host", "device": "moon", "count": 1}]), "no device 'moon'"),
        (("links", []), "no link 'eth'"),
        (("links", [{"name": "eth", "physical": {"bandwidth": {"gigabits_per_second": 0}}}]), "above 0"),
        (("edges", []), "no route from rank 0"),
        (("devices", "all"), "expected a list"),
    ],
)
def test_a_wrong_infragraph_is_refused(change: tuple[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        network_of_infrastructure({**INFRAGRAPH, change[0]: change[1]})
    assert says in str(caught.value)


def within_a_server(**edge: Any) -> dict[str, Any]:
    """Four xpus with one edge between them, and nothing else."""
    xpus = {"name": "server", "components": [{"name": "xpu", "count": 4, "choice": "xpu"}], "links": [PCIE]}
    edges = [{"ep1": {"component": "xpu"}, "ep2": {"component": "xpu"}, "link": "pcie", **edge}]
    return {"devices": [{**xpus, "edges": edges}], "instances": [{"name": "host", "device": "server"}]}


def test_an_edge_within_a_component_is_a_cable_between_every_two() -> None:
    network = network_of_infrastructure(within_a_server(scheme="many2many"))
    assert len(network.links) == 2 * 6
    assert not any("#" in link.name for link in network.links)


def test_a_quantity_in_an_unknown_unit_is_refused() -> None:
    record = within_a_server(scheme="ring")
    record["devices"][0]["links"] = [
        {"name": "pcie", "physical": {"bandwidth": {"gigabytes_per_second": 16}, "latency": {"s": 1}}}
    ]
    with pytest.raises(ValueError, match="latency is .* expected one of ms, us, ns"):
        network_of_infrastructure(record)


@each("key, says", [("cores", "is 4, and 8 in the first table"), ("memory_rate", "is 4, and 0 in the")])
def test_a_host_in_two_tables_has_one_number_of_cores(key: str, says: str) -> None:
    """The second one was not read."""
    cable = "[[cable]]\nbetween = ['a0', 'a1']\nrate = 1e9\n"
    first = "[[host]]\nname = 'a0'\nhost = 'a'\ncores = 8\n"
    again = f"[[host]]\nname = 'a1'\nhost = 'a'\n{key} = 4\n"
    with pytest.raises(ValueError, match=says):
        parse(first + again + cable)
    assert parse(first + again.replace(f"{key} = 4", "cores = 8") + cable).machines[0].cores == 8


def test_costs_of_nothing_are_written_as_such() -> None:
    places, machines = [RankLocation("a", 0), RankLocation("b", 1)], [Machine("a", 1, 0), Machine("b", 1, 0)]
    cables, costs = [Connection(("a", "b"), Cable(1e-6, 1e9))], (Costs(o_send_s=1e-6),)
    given = network_of("pair", places, cables, machines, memories={}, costs=costs)
    again = parse(toml(given)).costs_of(0)
    assert again.o_send_s == 1e-6
    assert max(again.reduce_s_per_byte, again.copy_s_per_byte) <= 1e-30


@each("text", [NCCL, HWLOC])
def test_a_network_link_by_link_is_the_same_network(text: str, tmp_path: Path) -> None:
    network = find(written(tmp_path / "n.xml", text))
    again = find(written(tmp_path / "n.toml", toml(network)))
    assert list(again.links) == list(network.links)
    for source in range(network.size):
        for target in range(network.size):
            assert again.route(source, target) == network.route(source, target)


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    '<system version="&b;"/>'
)


@each("text, says", [(BOMB, "entity"), ("<moon/>", "expected <system>"), ("<system", ":1: "), ("", ":1: ")])
def test_xml_that_is_something_else_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        find(written(tmp_path / "x.xml", text))
    assert says in str(caught.value)


def test_damaged_files_give_one_clear_error(tmp_path: Path) -> None:
    choice = random.Random(5)
    for name, text in (("a.xml", NCCL), ("b.xml", HWLOC), ("c.json", json.dumps(INFRAGRAPH))):
        for _ in range(150):
            damaged = bytearray(text.encode())
            at = choice.randrange(len(damaged))
            damaged[at : at + choice.randrange(30)] = choice.choice(
                [b"", b"-1", b"999999999999999999999", b"\xff"]
            )
            (tmp_path / name).write_bytes(damaged)
            try:
                find(str(tmp_path / name))
            except ValueError as error:
                assert str(error)
