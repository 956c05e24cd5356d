"""Networks: links, routes, symmetry, and the TOML that describes them."""

import random
import re
from pathlib import Path

import msgspec
import pytest

from loops import each
from unisono import networks as nets
from unisono.networks import Cable, Network
from unisono.networks.description import FABRICS, parse
from unisono.networks.found import find, shipped
from unisono.networks.quantities import bytes_per_s, nbytes, seconds, written_rate, written_time
from unisono.networks.writer import toml

HALF = Cable(1e-6, 1e9, "half")
MADE = [
    nets.two_hosts(ranks=4),
    nets.star(5, ranks=3),
    nets.star(4, ranks=2, cable=HALF),
    nets.star(3, ranks=4, nics=4, inside="switch"),
    nets.ring(7),
    nets.ring(2),
    nets.torus(4, 8),
    nets.torus(2, 3, 4, ranks=2),
    nets.full_mesh(5),
    nets.full_mesh(5, cable=HALF),
    nets.full_mesh(6, ranks=2, cable=HALF),
    nets.two_hosts(ranks=2, cable=HALF),
    nets.ring(7, cable=HALF),
    nets.torus(2, 3, 4, cable=HALF),
    nets.torus(4, 2, ranks=2, cable=HALF),
    nets.fat_tree(4),
    nets.fat_tree(8, oversubscription=2, ranks=2),
    nets.fat_tree(4, ranks=4, nics=2, inside="switch"),
    nets.rail_optimised(2, 4),
    nets.rail_optimised(3, 4, spines=2, crossing=True),
    nets.dragonfly(4, 2, 2),
    nets.dragonfly(3, 2, 1, ranks=2),
    nets.dgx(4),
]

LAB = """
name = "lab"
[[host]]
name = "a"
ranks = 2
[[host]]
name = "b"
[[switch]]
name = "s"
adds = "10 GB/s"
[[cable]]
between = ["a", "s"]
latency = "5 us"
rate = "100 Gbit/s"
[[cable]]
between = ["b", "s"]
latency = "5 us"
rate = "100 Gbit/s"
duplex = "half"
"""


def node(name: str) -> str:
    """The node that an end belongs to: ranks, memory and cards are parts of their host."""
    return re.split(r"\.(?:nic|gpu|switch|ranks|memory)", name)[0]


@each("network", MADE)
def test_a_route_goes_from_link_to_link(network: Network) -> None:
    assert len({link.name for link in network.links}) == len(network.links)
    hosts = [machine.name for machine in network.machines]
    choice = random.Random(1)
    for _ in range(200):
        source, target = choice.randrange(network.size), choice.randrange(network.size)
        route = network.route(source, target)
        assert route == network.route(source, target)
        assert bool(route) == (source != target)
        here = hosts[network.hosts[source]]
        for link in (network.links[number] for number in route):
            ends = [node(end) for end in link.ends]
            if link.duplex == "half" and ends[0] != here:
                ends.reverse()
            assert ends[0] == here, (source, target, [network.links[n].name for n in route])
            here = ends[1]
        assert here == hosts[network.hosts[target]]


@each(
    "network",
    [
        nets.two_hosts(cable=HALF),
        nets.ring(5, cable=HALF),
        nets.ring(2, cable=HALF),
        nets.full_mesh(6, cable=HALF),
    ],
)
def test_both_ways_of_a_half_duplex_cable_are_one_link(network: Network) -> None:
    beside = [
        (a, b) for a in range(network.size) for b in range(network.size) if len(network.route(a, b)) == 1
    ]
    assert beside
    assert all(network.route(a, b) == network.route(b, a) for a, b in beside)
    with pytest.raises(ValueError, match="full duplex"):
        nets.dragonfly(4, 2, 2, cable=HALF)


@each("network", MADE)
def test_a_symmetry_maps_routes_onto_routes(network: Network) -> None:
    symmetry = network.symmetry
    assert symmetry is not None
    choice = random.Random(2)
    for _ in range(200):
        shift = [choice.randrange(axis.size) if axis.kind != "fixed" else 0 for axis in symmetry.axes]
        source, target = choice.randrange(network.size), choice.randrange(network.size)
        moved = tuple(symmetry.link_image(link, shift) for link in network.route(source, target))
        assert moved == network.route(symmetry.image(source, shift), symmetry.image(target, shift))


@each("network", MADE)
def test_a_part_of_a_network_keeps_what_symmetry_it_can(network: Network) -> None:
    choice = random.Random(3)
    for size in range(1, network.size):
        part = network.first(size)
        assert part.size == len(part.hosts) == size
        symmetry = part.symmetry
        if symmetry is None:
            continue
        for _ in range(5):
            shift = [choice.randrange(axis.size) if axis.kind != "fixed" else 0 for axis in symmetry.axes]
            source, target = choice.randrange(size), choice.randrange(size)
            images = symmetry.image(source, shift), symmetry.image(target, shift)
            assert max(images) < size
            moved = tuple(symmetry.link_image(link, shift) for link in part.route(source, target))
            assert moved == part.route(*images)


def test_the_numbers_of_links_are_those_of_the_papers() -> None:
    assert nets.fat_tree(8).size == 8**3 // 4
    assert len(nets.fat_tree(8).links) == 2 * 3 * 128
    assert len(nets.fat_tree(8, oversubscription=2).links) == 2 * (128 + 64 + 64)
    assert len(nets.torus(4, 8).links) == 2 * 2 * 32
    assert len(nets.full_mesh(5).links) == 5 * 4
    assert nets.dragonfly(4, 2, 2).size == 9 * 8
    assert len(nets.dragonfly(4, 2, 2).links) == 2 * 72 + 9 * 4 * 3 + 9 * 8
    assert max(len(nets.dragonfly(4, 2, 2).route(0, n)) for n in range(1, 72)) == 5
    assert max(len(nets.torus(4, 8).route(0, n)) for n in range(1, 32)) == 2 + 4


def test_a_hundred_thousand_ranks_take_a_second_and_no_table() -> None:
    network = nets.fat_tree(74)
    assert network.size == 101_306
    assert [len(network.route(0, n)) for n in (1, 37, 101_305)] == [2, 4, 6]
    assert network.links.latency_s.shape == (len(network.links),)


def test_switches_that_add_are_ends_of_routes() -> None:
    star = nets.star(3, ranks=2, adds_bytes_per_s=1e9)
    assert [link.name for link in map(star.links.__getitem__, star.route(5, 6))] == ["host2.nic0>switch"]
    assert [link.name for link in map(star.links.__getitem__, star.route(6, 0))] == ["switch>host0.nic0"]
    lab = parse(LAB)
    assert [switch.name for switch in lab.switches] == ["s"]
    assert [lab.links[link].name for link in lab.route(2, 3)] == ["b=s"]


def test_routes_between_cables_by_name_have_the_fewest_links() -> None:
    lab = parse(LAB)
    names = [lab.links[link].name for link in lab.route(0, 2)]
    assert names == ["a>s", "b=s"]
    assert lab.route(2, 0)[0] == lab.route(0, 2)[1]  # half duplex: one link for both directions
    assert [lab.links[link].name for link in lab.route(0, 1)] == ["a.ranks=a.memory"]


@each("name", shipped())
def test_shipped_networks_are_what_their_names_say(name: str) -> None:
    network = find(name)
    assert network.name == name
    assert network.route(0, network.size - 1)


def test_what_grows_has_room_for_the_ranks_that_are_needed() -> None:
    for name in ("dgx_h100", "dgx_a100", "fat_tree", "ring", "two_hosts"):
        assert find(name).size < 1000 <= find(name, 1000).size < 2500
    assert find("fat_tree", 100_000).size == 101_306


@each(
    "change, line, says",
    [
        (("latency", '"5 us"\nrate = "100 Gbit/s"\nduplex', '"5 us"\nrate = 0\nduplex'), 18, "above 0"),
        (("between", '"b", "s"', '"x", "s"'), 16, "no host or switch 'x'"),
        (("name", 'name = "b"', 'name = "b"\ncolour = 3'), 8, "colour: is unknown"),
        (("name", 'name = "b"', 'name = "a"'), 7, "two nodes"),
        (("cable", '["b", "s"]', '["a", "s"]'), 6, "no route from rank 0"),
        (("syntax", 'name = "lab"', "name ="), 2, "Invalid value"),
        (("ranks", "ranks = 2", "ranks = -2"), 5, "is -2"),
        (("latency", 'latency = "5 us"', 'latency = "five"'), 13, "no time"),
        (("duplex", '"half"', '"quarter"'), 19, "expected 'full' or 'half'"),
    ],
)
def test_an_error_names_its_line(change: tuple[str, str, str], line: int, says: str) -> None:
    _, before, after = change
    assert before in LAB
    with pytest.raises(ValueError, match=rf"^lab\.toml:{line}: ") as caught:
        parse(LAB.replace(before, after, 1), "lab.toml")
    assert says in str(caught.value)


@each(
    "text, says",
    [
        ('[fabric]\nkind = "torus"\nsizes = [3, 0]', "f:3: fabric.sizes: is 0"),
        ('[fabric]\nkind = "fat_tree"\nk = 3', "f:3: fabric.k: k is 3, expected an even"),
        ('[fabric]\nkind = "fat_tree"\nk = 8\noversubscription = 3', "f:4: fabric.oversubscription"),
        ('[fabric]\nkind = "star"', "f:1: fabric: lacks hosts"),
        ('[fabric]\nkind = "moon"', "f:2: fabric.kind: is 'moon'"),
        ('[hosts]\nnics = 3\n[fabric]\nkind = "ring"\nhosts = 3', "nics is 3, expected 1..1"),
        ('[fabric]\nkind = "ring"\nhosts = 99999999999', "is 99999999999"),
        ('[[host]]\nname = "a"\n[fabric]\nkind = "ring"', "cannot stand beside"),
        ('grows = "moon"\n[fabric]\nkind = "ring"\nhosts = 3', "f:1: grows"),
        ("", "f:1: describes nothing"),
    ],
)
def test_a_wrong_fabric_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text, "f")
    assert says in str(caught.value)


def test_every_kind_of_fabric_can_be_written(tmp_path: Path) -> None:
    for kind, keys in {
        "two_hosts": "",
        "star": "hosts = 3",
        "ring": "hosts = 3",
        "torus": "sizes = [2, 3]",
        "full_mesh": "hosts = 3",
        "fat_tree": "k = 4",
        "rail_optimised": "units = 2",
        "dragonfly": "routers = 2\nhosts = 2\ncables = 1",
        "dgx": "hosts = 2",
    }.items():
        file = tmp_path / f"{kind}.toml"
        file.write_text(f'[fabric]\nkind = "{kind}"\n{keys}\n')
        assert find(str(file)).size > 1
        assert kind in FABRICS


def test_wrong_arguments_of_generators_are_refused() -> None:
    for make, says in (
        (lambda: nets.fat_tree(5), "even"),
        (lambda: nets.torus(), "dimensions"),
        (lambda: nets.ring(0), "hosts is 0"),
        (lambda: nets.star(3, cable=Cable(1e-6, 0.0)), "rate of the cable"),
        (lambda: nets.star(3, cable=Cable(-1.0, 1e9)), "latency of the cable"),
        (lambda: nets.star(3, cable=Cable(1e-6, float("inf"))), "finite"),
        (lambda: nets.star(3, moons=2), "moons"),
        (lambda: nets.ring(1 << 40), "hosts is"),
        (lambda: nets.star(3).route(0, 3), "target is 3"),
        (lambda: nets.star(3).first(4), "number of ranks is 4"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        assert says in str(caught.value)


def test_quantities_are_read_as_people_write_them() -> None:
    assert seconds("5 us") == 5e-6
    assert seconds(2) == 2.0
    assert bytes_per_s("100 Gbit/s") == 12.5e9
    assert bytes_per_s("50 GB/s") == 50e9
    assert bytes_per_s("1 GiB/s") == 2**30
    assert nbytes("64 KiB") == 65536
    for text in ("5", "us", "-5 us", "1e400 s", "5 lightyears"):
        with pytest.raises(ValueError):
            seconds(text)
    for value in ("0 GB/s", 0, -1, True, "50 GB", float("nan")):
        with pytest.raises(ValueError):
            bytes_per_s(value)
    assert seconds(written_time(1.5e-7)) == pytest.approx(1.5e-7)
    assert bytes_per_s(written_rate(12.5e9)) == 12.5e9


def test_costs_and_switching_are_written_and_read(tmp_path: Path) -> None:
    """All keys of [costs], and how switches forward, come back from the file link by link."""
    text = LAB.replace('name = "lab"', 'name = "lab"\nswitching = "store-and-forward"', 1)
    text += (
        '[costs]\nsend = "1 us"\nreceive = "2 us"\ncall = "3 us"\nwake = "4 us"\n'
        'larger = [{ than = "1 MiB", copy = "4 GB/s", per_byte = "8 GB/s" }, '
        '{ than = "32 MiB", reduce = 1e9 }]\n'
        'inside = { send = "0.1 us", receive = "0.2 us", write = "2 GB/s", copy = "4 GB/s", '
        'in_place = "128 KiB", in_place_copy = "5 GB/s" }\n'
    )
    network = nets.parse(text)
    costs = network.costs_of(0)
    assert network.stores
    assert (costs.call_s, costs.wake_s) == (3e-6, 4e-6)
    assert [(size.beyond_bytes, size.copy, size.send, size.reduce) for size in costs.larger] == [
        (1 << 20, 2.5e-10, 1.25e-10, None),
        (32 << 20, None, None, 1e-9),
    ]
    assert costs.inside is not None
    assert msgspec.structs.astuple(costs.inside) == pytest.approx(
        (1e-7, 2e-7, 5e-10, 2.5e-10, 128 << 10, 2e-10)
    )
    again = nets.parse(toml(network))
    assert again.stores
    assert again.costs_of(0) == costs
    for before, after, says in (
        ('"store-and-forward"', '"sometimes"', "switching: is 'sometimes'"),
        ('than = "1 MiB"', 'than = "64 MiB"', "larger: has sizes that do not ascend"),
        ('than = "1 MiB", ', "", "larger: is "),
        ("reduce = 1e9", "write_rate = 1e9", "write_rate: is unknown"),
        ("reduce = 1e9", "reduce = 0", "expected one above 0"),
        ('send = "0.1 us"', "sends = 1", "is unknown"),
        ('copy = "4 GB/s"', "copy = 1e-320", "is not a finite number"),
    ):
        assert before in text
        with pytest.raises(ValueError, match=says):
            nets.parse(text.replace(before, after, 1))


def test_bursts_and_shared_cores_are_read_and_written() -> None:
    """A cable's burst is that of both ways; `back` has its own."""
    text = LAB.replace('rate = "100 Gbit/s"', 'rate = "100 Gbit/s"\nburst = "256 KiB"', 1)
    text = text.replace(
        '[[cable]]\nbetween = ["b"', 'back = { rate = "1 GB/s", burst = 1000 }\n[[cable]]\nbetween = ["b"'
    )
    network = nets.parse(text)
    bursts = {link.name: link.burst_bytes for link in network.links}
    assert (bursts["a>s"], bursts["s>a"]) == (256 << 10, 1000)
    assert sorted(network.links.burst_bytes) == sorted(bursts.values())
    assert {link.name: link.burst_bytes for link in nets.parse(toml(network)).links} == bursts
    with pytest.raises(ValueError, match=r"cable.*burst"):
        nets.parse(text.replace('"256 KiB"', "-1"))
    hosts = (
        '[hosts]\nshared_cores = 2\n[fabric]\nkind = "star"\nhosts = 4\ncable = { rate = 1e9, burst = 5 }\n'
    )
    star = nets.parse(hosts)
    assert (star.shared_cores, star.first(3).shared_cores) == (2, 2)
    assert set(star.links.burst_bytes) == {5.0}
    with pytest.raises(ValueError, match="shared_cores"):
        nets.parse(hosts.replace("= 2", "= -2", 1))
    with pytest.raises(ValueError, match="burst"):
        nets.star(2, cable=nets.Cable(0.0, 1e9, burst_bytes=-1.0))
