"""A network as TOML, link by link. What generators make is written out, too."""

from __future__ import annotations

import json
from collections.abc import Iterator

from unisono.networks.cost_table import LARGER
from unisono.networks.costs import ByteCosts, Costs
from unisono.networks.graph import GraphRouter
from unisono.networks.network import Network

__all__ = ["MOST_LINKS", "toml"]

MOST_LINKS = 20_000


def toml(network: Network) -> str:
    """The text of a file that `description.read` reads. Names of nodes are those of the links.

    A host whose ranks lie on nodes of their own is written as several [[host]] tables with the same `host`.

    Raises:
        ValueError: it has too many links, or was made by a generator, whose file is shorter.
    """
    if len(network.links) > MOST_LINKS:
        raise ValueError(
            f"{network.name} has {len(network.links)} links, at most {MOST_LINKS} can be written"
        )
    return "\n".join(_lines(network)) + "\n"


def _lines(network: Network) -> Iterator[str]:
    if not isinstance(network.router, GraphRouter):
        raise ValueError(
            f"{network.name} was made by a generator: its file is shorter than a list of its links"
        )
    yield f"name = {json.dumps(network.name)}"
    if network.stores:
        yield 'switching = "store-and-forward"'
    places = list(network.router.nodes)
    adders = {switch.name: switch.adds_bytes_per_s for switch in network.switches}
    memories = dict(network.router.inside)
    seen: set[str] = set()
    for rank, node in enumerate(places):
        if node in seen:
            continue
        seen.add(node)
        machine = network.machines[network.hosts[rank]]
        yield f"\n[[host]]\nname = {json.dumps(node)}\nranks = {places.count(node)}"
        if machine.name != node:
            yield f"host = {json.dumps(machine.name)}"
        if machine.cores:
            yield f"cores = {machine.cores}"
        if machine.memory_bytes_per_s:
            yield f"memory_rate = {machine.memory_bytes_per_s!r}"
        if node in memories:
            memory = network.links[memories[node]]
            yield f"memory = {{ latency = {memory.latency_s!r}, rate = {memory.bytes_per_s!r} }}"
        yield f"costs = {{ {_costs(network.costs_of(rank))} }}"
    for node in sorted(network.router.neighbours):
        if node not in seen:
            adds = f"\nadds = {adders[node]!r}" if adders.get(node) else ""
            yield f"\n[[switch]]\nname = {json.dumps(node)}{adds}"
    yield from _cables(network.router)


def _cables(router: GraphRouter) -> Iterator[str]:
    for (source, target), cable, back in router.connections:
        yield f"\n[[cable]]\nbetween = [{json.dumps(source)}, {json.dumps(target)}]"
        yield f"latency = {cable.latency_s!r}\nrate = {cable.bytes_per_s!r}"
        if cable.duplex == "half":
            yield 'duplex = "half"'
        if cable.burst_bytes:
            yield f"burst = {int(cable.burst_bytes)}"
        if back is not None:
            burst = f", burst = {int(back.burst_bytes)}" if back.burst_bytes else ""
            yield f"back = {{ latency = {back.latency_s!r}, rate = {back.bytes_per_s!r}{burst} }}"


def _costs(costs: Costs) -> str:
    found = [
        f"send = {costs.o_send_s!r}",
        f"receive = {costs.o_recv_s!r}",
        f"gap = {costs.g_s!r}",
        f"rendezvous = {costs.rendezvous_bytes}",
    ]
    if costs.o_s_per_byte:
        found.append(f"per_byte = {_rate(costs.o_s_per_byte)}")
    # Written also where they are 0: what a file does not name is that of a CPU.
    found += [f"reduce = {_rate(costs.reduce_s_per_byte)}", f"copy = {_rate(costs.copy_s_per_byte)}"]
    if costs.call_s:
        found.append(f"call = {costs.call_s!r}")
    if costs.wake_s:
        found.append(f"wake = {costs.wake_s!r}")
    if costs.inside is not None:
        inside = f"send = {costs.inside.send_s!r}, receive = {costs.inside.recv_s!r}"
        inside += f", write = {1 / costs.inside.write_s_per_byte!r}" if costs.inside.write_s_per_byte else ""
        inside += f", copy = {1 / costs.inside.s_per_byte!r}" if costs.inside.s_per_byte else ""
        inside += f", in_place = {costs.inside.in_place_bytes}" if costs.inside.in_place_bytes else ""
        rate = costs.inside.in_place_s_per_byte
        inside += f", in_place_copy = {1 / rate!r}" if rate else ""
        found.append(f"inside = {{ {inside} }}")
    if costs.larger:
        found.append(f"larger = [{', '.join(map(_larger, costs.larger))}]")
    return ", ".join(found)


def _rate(s_per_byte: float) -> str:
    """A cost per byte as a rate; what costs nothing has a very high one."""
    return repr(1 / max(s_per_byte, 1e-30))


def _larger(size: ByteCosts) -> str:
    given = {key: getattr(size, name) for key, name in LARGER.items()}
    rates = [f"{key} = {_rate(cost)}" for key, cost in given.items() if cost is not None]
    return f"{{ {', '.join([f'than = {size.beyond_bytes}', *rates])} }}"
