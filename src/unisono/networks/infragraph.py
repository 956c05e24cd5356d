"""InfraGraph: devices with components, instances of devices, and edges between them, as JSON or YAML.

Every xpu is a rank (every cpu where there are no xpus); the components of an instance form a host. All other
components are switches. YAML needs the package PyYAML.

Source: Keysight's open schema InfraGraph.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

from unisono.networks.fabric import Cable
from unisono.networks.generators import CPU, GPU
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.networks.network import Machine, Network

__all__ = ["network_of_infrastructure", "read_infragraph"]

MOST_BYTES = 64 << 20
MOST_NODES = 1 << 20
MOST_DEPTH = 32
LANES = 16
RATES = {
    "gigabits_per_second": 1e9 / 8,
    "gigabytes_per_second": 1e9,
    "gigatransfers_per_second": LANES * 1e9 / 8,
}
TIMES = {"ms": 1e3, "us": 1e6, "ns": 1e9}


def read_infragraph(file: str | Path) -> Network:
    """The network in a file.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the place.
        ModuleNotFoundError: YAML without the package PyYAML.
    """
    file = Path(file)
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        return network_of_infrastructure(_loaded(file, data), file.stem)
    except _Wrong as error:
        raise ValueError(f"{file}: {error}") from None


def _loaded(file: Path, data: bytes) -> Any:
    if file.suffix == ".json":
        try:
            return json.loads(data)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # no UTF-8, or a number of too many digits
            raise ValueError(f"{file}: {error}") from None
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{file}: YAML needs the package PyYAML: pip install 'unisono[networks]'", name="yaml"
        ) from None
    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise ValueError(f"{file}:{line}: {getattr(error, 'problem', None) or error}") from None


class _Wrong(ValueError):
    """A place and what is wrong there."""


class _Device:
    """A device: its components by name, and the edges within it."""

    def __init__(self, where: str, record: dict[str, Any]) -> None:
        self.where = where
        self.components: dict[str, tuple[str, int]] = {}
        for at, each in enumerate(_list(record, "components", where)):
            place = f"{where}.components[{at}]"
            kind = each.get("choice") or each.get("type") or "custom"
            self.components[_text(each, "name", place)] = (str(kind), _count(each, place))
        self.links = _links(record, where)
        self.edges = _list(record, "edges", where)


class _ComponentGraph:
    def __init__(self, top: dict[str, Any]) -> None:
        self.devices = {
            _text(each, "name", f"devices[{at}]"): _Device(f"devices[{at}]", each)
            for at, each in enumerate(_list(top, "devices", ""))
        }
        self.links = _links(top, "")
        self.kinds: dict[str, str] = {}
        self.counts: dict[str, int] = {}  # of the components of a name
        self.devices_within: set[str] = set()
        self.hosts: dict[str, str] = {}
        self.connections: list[Connection] = []
        self.instances: dict[str, tuple[str, int]] = {}
        total = 0
        for at, each in enumerate(_list(top, "instances", "")):
            place = f"instances[{at}]"
            device = _text(each, "device", place)
            if device not in self.devices:
                raise _Wrong(f"{place}: there is no device {device!r}")
            name = _text(each, "name", place)
            self.instances[name] = (device, _count(each, place))
            total += self.instances[name][1]
            if total > MOST_NODES:
                raise _Wrong(f"{place}: there are more than {MOST_NODES} instances")
            for number in range(self.instances[name][1]):
                self.device(f"{name}.{number}", device, f"{name}.{number}", ())
        for at, edge in enumerate(_list(top, "edges", "")):
            self.edge(edge, f"edges[{at}]", self.links, self.far_end)

    def device(self, prefix: str, name: str, host: str, within: tuple[str, ...]) -> None:
        """The nodes and cables of one instance of a device."""
        if name in within:
            raise _Wrong(f"device {name!r} contains itself")
        if len(within) > MOST_DEPTH:
            raise _Wrong(f"device {name!r} lies within more than {MOST_DEPTH} others")
        device = self.devices[name]
        for component, (kind, count) in device.components.items():
            self.counts[f"{prefix}.{component}"] = count
            for number in range(count):
                node = f"{prefix}.{component}.{number}"
                if kind == "device":
                    if component not in self.devices:
                        raise _Wrong(f"{device.where}: there is no device {component!r}")
                    self.devices_within.add(node)
                    if len(self.devices_within) > MOST_NODES:
                        raise _Wrong(f"there are more than {MOST_NODES} devices within others")
                    self.device(node, component, host, (*within, name))
                    continue
                self.kinds[node], self.hosts[node] = kind, host
                if len(self.kinds) > MOST_NODES:
                    raise _Wrong(f"there are more than {MOST_NODES} components")
        for at, edge in enumerate(device.edges):
            links = {**self.links, **device.links}
            self.edge(
                edge,
                f"{device.where}.edges[{at}]",
                links,
                lambda end, where: self.near_end(prefix, end, where),
            )

    def near_end(self, prefix: str, end: Any, where: str) -> list[str]:
        """The nodes of an end within a device."""
        if not isinstance(end, dict):
            raise _Wrong(f"{where}: is {end!r}, expected a component")
        names = [str(end[key]) for key in ("device", "component") if end.get(key)]
        parts = [part for name in names for part in name.split(".")]
        return self._nodes([prefix], parts, where)

    def far_end(self, end: Any, where: str) -> list[str]:
        """The nodes of an end of an edge between instances."""
        if not isinstance(end, dict):
            raise _Wrong(f"{where}: is {end!r}, expected an instance and a component")
        name, chosen = _sliced(_text(end, "instance", where), where)
        if name not in self.instances:
            raise _Wrong(f"{where}: there is no instance {name!r}")
        instances = [f"{name}.{number}" for number in range(self.instances[name][1])[chosen]]
        return self._nodes(instances, _text(end, "component", where).split("."), where)

    def _nodes(self, prefixes: list[str], parts: list[str], where: str) -> list[str]:
        for part in parts:
            name, chosen = _sliced(part, where)
            prefixes = [
                f"{prefix}.{name}.{number}"
                for prefix in prefixes
                for number in range(self.counts.get(f"{prefix}.{name}", 0))[chosen]
            ]
        if not prefixes:
            raise _Wrong(f"{where}: there is no component {'.'.join(parts)!r}")
        return prefixes

    def edge(self, edge: Any, where: str, links: dict[str, Cable], nodes: Any) -> None:
        """The cables of an edge."""
        link = _text(edge, "link", where)
        if link not in links:
            raise _Wrong(f"{where}: there is no link {link!r}, or it has no bandwidth")
        one, other = nodes(edge.get("ep1"), f"{where}.ep1"), nodes(edge.get("ep2"), f"{where}.ep2")
        scheme = edge.get("scheme", "one2one")
        if scheme == "one2one":
            if len(one) != len(other) and 1 not in (len(one), len(other)):
                raise _Wrong(f"{where}: one2one of {len(one)} and {len(other)} components")
            count = max(len(one), len(other))
            pairs = list(zip(one * (count // len(one)), other * (count // len(other)), strict=True))
        elif len(one) * len(other) > MOST_NODES and scheme == "many2many":
            raise _Wrong(f"{where}: many2many of {len(one)} and {len(other)} components")
        elif scheme == "many2many":
            pairs = list(product(one, other))
        elif scheme == "ring":
            every = list(dict.fromkeys([*one, *other]))
            pairs = (
                list(zip(every, every[1:] + every[:1], strict=True))
                if len(every) > 2
                else [(every[0], every[-1])]
            )
        else:
            raise _Wrong(f"{where}: scheme is {scheme!r}, expected one2one, many2many or ring")
        once: dict[frozenset[str], tuple[str, str]] = {}  # a cable has both ways: (b, a) is that of (a, b)
        for ends in pairs:
            once.setdefault(frozenset(ends), ends)
        self.connections += [Connection(ends, links[link]) for ends in once.values() if ends[0] != ends[1]]
        if len(self.connections) > MOST_NODES:
            raise _Wrong(f"there are more than {MOST_NODES} cables")


def network_of_infrastructure(record: Any, name: str = "infrastructure") -> Network:
    """As `read_infragraph`, from the decoded file.

    Raises:
        ValueError: it is wrong; the message names the place.
    """
    if isinstance(record, dict) and isinstance(record.get("infrastructure"), dict):
        record = record["infrastructure"]
    if not isinstance(record, dict):
        raise _Wrong("expected a table with devices, instances and edges")
    graph = _ComponentGraph(record)
    kind = "xpu" if "xpu" in graph.kinds.values() else "cpu"
    ranks = [node for node, each in graph.kinds.items() if each == kind]
    if not ranks:
        raise _Wrong("has no component of kind xpu or cpu")
    hosts = {host: number for number, host in enumerate(dict.fromkeys(graph.hosts[node] for node in ranks))}
    places = [RankLocation(node, hosts[graph.hosts[node]]) for node in ranks]
    machines = [Machine(host, 0, 0.0) for host in hosts]
    costs = (GPU if kind == "xpu" else CPU,)
    title = str(record.get("name") or name)
    return network_of(title, places, graph.connections, machines, memories={}, costs=costs)


def _links(record: dict[str, Any], where: str) -> dict[str, Cable]:
    """The links that have a bandwidth."""
    found = {}
    for at, each in enumerate(_list(record, "links", where)):
        place = f"{where}.links[{at}]".lstrip(".")
        name = _text(each, "name", place)
        physical = each.get("physical") or each
        if not isinstance(physical, dict):
            raise _Wrong(f"{place}: physical is {physical!r}, expected a table")
        rate = _value(physical.get("bandwidth"), RATES, f"{place}: bandwidth")
        latency = _value(physical.get("latency"), {}, f"{place}: latency")
        if rate is not None:
            if rate <= 0:
                raise _Wrong(f"{place}: the bandwidth is {rate:g}, expected one above 0")
            found[name] = Cable(latency or 0.0, rate)
    return found


def _value(record: Any, units: dict[str, float], where: str) -> float | None:
    """A quantity with its unit; without `units` it is a time."""
    if record is None:
        return None
    if not isinstance(record, dict):
        raise _Wrong(f"{where} is {record!r}, expected a table such as {{choice: us, us: 5}}")
    for unit in units or TIMES:
        value = record.get(unit)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
                raise _Wrong(f"{where} is {value!r}, expected a number of at least 0")
            return value * units[unit] if units else value / TIMES[unit]
    if any(value is not None for key, value in record.items() if key != "choice"):
        raise _Wrong(f"{where} is {record!r}, expected one of {', '.join(units or TIMES)}")
    return None


def _list(record: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = record.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _Wrong(f"{where}.{key}".lstrip(".") + ": expected a list of tables")
    return value


def _text(record: Any, key: str, where: str) -> str:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str) or not value:
        raise _Wrong(f"{where}: {key} is {value!r}, expected a name")
    return value


def _count(record: dict[str, Any], where: str) -> int:
    value = record.get("count", 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_NODES:
        raise _Wrong(f"{where}: count is {value!r}, expected 1..{MOST_NODES}")
    return value


def _sliced(text: str, where: str) -> tuple[str, slice]:
    """The name and the slice of "cx5[0:2]", "cx5[3]" or "cx5"."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[(\d{0,7})(:?)(\d{0,7})(?::(\d{1,7}))?\])?", text)
    if not found:
        raise _Wrong(f"{where}: {text[:60]!r} is no name with indexes, such as cx5[0:2]")
    name, first, colon, last, step = found.groups()
    if first and not colon:
        return name, slice(int(first), int(first) + 1)
    return name, slice(
        int(first) if first else None, int(last) if last else None, int(step) if step else None
    )
