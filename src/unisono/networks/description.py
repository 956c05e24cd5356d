"""Networks written as TOML: equal hosts on a fabric, or hosts, switches and cables by name.

    name = "four hosts of eight GPUs"            name = "lab"

    [hosts]                                      [[host]]
    ranks = 8                                    name = "a"
    inside = "switch"                            ranks = 2
    inner = { latency = "0.5 us",                memory = { latency = "0.3 us", rate = "10 GB/s" }
              rate = "450 GB/s" }
    nics = 8                                     [[switch]]
                                                 name = "s"
    [fabric]
    kind = "rail_optimised"                      [[cable]]
    units = 1                                    between = ["a", "s"]
    hosts = 4                                    latency = "5 us"
    cable = { latency = "1 us",                  rate = "100 Gbit/s"
              rate = "50 GB/s" }

docs/networks.md lists all keys. An error names the file and the line.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unisono.engine.base.validation import instance
from unisono.networks import generators
from unisono.networks.cost_table import costs_of, known, quantity
from unisono.networks.fabric import Cable
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.networks.network import Machine, Network
from unisono.networks.places import At, DescriptionError, line_of
from unisono.networks.quantities import bytes_per_s, nbytes, seconds
from unisono.networks.toml import tables_of, text_of

__all__ = ["FABRICS", "parse", "read"]

FABRICS: dict[str, Callable[..., Network]] = {
    each.__name__: each
    for each in (
        generators.two_hosts,
        generators.star,
        generators.ring,
        generators.torus,
        generators.full_mesh,
        generators.fat_tree,
        generators.rail_optimised,
        generators.dragonfly,
        generators.dgx,
    )
}
"""The kinds of a fabric."""

MOST_CABLES = 1 << 20
SWITCHING = ("cut-through", "store-and-forward")


def read(file: str | Path, size: int = 0) -> Network:
    """The network that a TOML file describes.

    Args:
        size: ranks that are needed; where the file says what `grows`, that is raised until there are as many.
    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the line.
    """
    file = Path(file)
    return parse(text_of(file), str(file), size)


def parse(text: str, file: str = "network.toml", size: int = 0) -> Network:
    """The network that a text in TOML describes; `file` is for messages, `size` as for `read`.

    Raises:
        ValueError: it is wrong; the message names the file and the line.
        ModuleNotFoundError: Python 3.10 without the package tomli.
    """
    tables = tables_of(instance(text, str, "text"), file)
    try:
        found = _network(tables)
        while found.size < size and "grows" in tables:
            _grow(tables, size / found.size)
            found = _network(tables)
        return found
    except DescriptionError as error:
        place = [f"{error.at}"] if error.at.path else []
        raise ValueError(": ".join([f"{file}:{line_of(text, error.at)}", *place, str(error)])) from None


# ---- the tables --------------------------------------------------------------------------------------


def _network(tables: dict[str, Any]) -> Network:
    named = {"host", "switch", "cable"} & set(tables)
    generated = {"hosts", "fabric"} & set(tables)
    if named and generated:
        raise DescriptionError(
            At((min(named),)),
            f"[[{min(named)}]] cannot stand beside [{min(generated)}]: write one or the other",
        )
    if not named and not generated:
        raise DescriptionError(At(()), "describes nothing: expected a [fabric], or [[host]] and [[cable]]")
    found = _by_name(tables) if named else _generated(tables)
    switching = tables.get("switching", SWITCHING[0])
    if switching not in SWITCHING:
        raise DescriptionError(At(("switching",)), f"is {switching!r}, expected {' or '.join(SWITCHING)}")
    return msgspec.structs.replace(found, stores=switching != SWITCHING[0])


def _generated(tables: dict[str, Any]) -> Network:
    top = At(())
    known(tables, top, {"name", "hosts", "fabric", "costs", "grows", "switching"})
    _grown(tables)
    counts = ("ranks", "nics", "cores", "shared_cores")
    hosts = _table(tables, "hosts", top, {*counts, "inside", "inner", "memory"})
    arguments: dict[str, Any] = {}
    for key in counts:
        if key in hosts:
            arguments[key] = _whole(hosts[key], top / "hosts" / key, 0 if key.endswith("cores") else 1)
    if "inside" in hosts:
        arguments["inside"] = hosts["inside"]
        if hosts["inside"] not in ("memory", "switch"):
            raise DescriptionError(
                top / "hosts" / "inside", f"is {hosts['inside']!r}, expected 'memory' or 'switch'"
            )
    if "inner" in hosts:
        arguments["inner"] = _cable(hosts["inner"], top / "hosts" / "inner")
    if "memory" in hosts:
        arguments["memory_bytes_per_s"] = quantity(bytes_per_s, hosts["memory"], top / "hosts" / "memory")
    if "costs" in tables:
        arguments["costs"] = costs_of(tables["costs"], top / "costs")
    fabric = _table(tables, "fabric", top, None)
    return _built(fabric, arguments, str(tables.get("name", "")))


GROWING = ("hosts.ranks", "fabric.hosts", "fabric.units", "fabric.k")


def _grown(tables: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The table and the key that grow."""
    if "grows" not in tables:
        return None
    at = At(("grows",))
    if tables["grows"] not in GROWING:
        raise DescriptionError(at, f"is {tables['grows']!r}, expected one of {', '.join(GROWING)}")
    table, _, key = tables["grows"].partition(".")
    if not isinstance(tables.get(table), dict) or key not in tables[table]:
        raise DescriptionError(at, f"there is no {tables['grows']} in this file")
    return tables[table], key


def _grow(tables: dict[str, Any], factor: float) -> None:
    """Raise what grows, so that there are about `factor` times as many ranks."""
    found = _grown(tables)
    assert found is not None
    table, key = found
    value = _whole(table[key], At(tuple(tables["grows"].split("."))), 1)
    if key == "k":
        table[key] = 2 * max(value // 2 + 1, math.ceil(value * factor ** (1 / 3) / 2 - 1e-9))
    else:
        table[key] = max(value + 1, math.ceil(value * factor))


def _built(fabric: dict[str, Any], arguments: dict[str, Any], name: str) -> Network:
    at = At(("fabric",))
    kind = fabric.get("kind")
    if not isinstance(kind, str) or kind not in FABRICS:
        raise DescriptionError(at / "kind", f"is {kind!r}, expected one of {', '.join(FABRICS)}")
    parameters = inspect.signature(FABRICS[kind]).parameters
    own = {key for key, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
    known(fabric, at, {"kind", *own})
    sizes: tuple[int, ...] = ()
    for key, value in fabric.items():
        here = at / key
        if key in ("cable", "between"):
            arguments[key] = _cable(value, here)
        elif key == "sizes":
            if not isinstance(value, list):
                raise DescriptionError(here, f"is {value!r}, expected a list such as [4, 8]")
            sizes = tuple(_whole(each, here, 1) for each in value)
        elif key == "adds_bytes_per_s":
            arguments[key] = quantity(bytes_per_s, value, here)
        elif key == "crossing":
            if not isinstance(value, bool):
                raise DescriptionError(here, f"is {value!r}, expected true or false")
            arguments[key] = value
        elif key != "kind":
            arguments[key] = _whole(value, here, 0)
    missing = [
        key for key, each in parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and key not in arguments
    ]  # fmt: skip
    if missing:
        raise DescriptionError(at, f"lacks {missing[0]}, which {kind} needs")
    try:
        found = FABRICS[kind](*sizes, **arguments)
    except (ValueError, TypeError) as error:
        key = next((key for key in fabric if key != "kind" and str(error).startswith(key)), "")
        raise DescriptionError(at / key if key else at, str(error)) from None
    return msgspec.structs.replace(found, name=name) if name else found


def _by_name(tables: dict[str, Any]) -> Network:
    top = At(())
    known(tables, top, {"name", "host", "switch", "cable", "costs", "switching"})
    common = costs_of(tables["costs"], top / "costs") if "costs" in tables else generators.CPU
    places: list[RankLocation] = []
    machines: list[Machine] = []
    memories: dict[str, Cable] = {}
    costs = [common]
    adders: list[tuple[str, float]] = []
    names: set[str] = set()
    numbers: dict[str, int] = {}
    written: list[int] = []
    for number, host in enumerate(_list(tables, "host")):
        at = top / "host" / number
        known(host, at, {"name", "host", "ranks", "memory", "cores", "memory_rate", "costs"})
        name = _name(host, at, names)
        ranks = _whole(host.get("ranks", 1), at / "ranks", 1)
        if "costs" in host:
            costs.append(costs_of(host["costs"], at / "costs", common))
        which = len(costs) - 1 if "costs" in host else 0
        machine = host.get("host", name)
        if not isinstance(machine, str):
            raise DescriptionError(at / "host", f"is {machine!r}, expected the name of a host")
        place = numbers.setdefault(machine, len(numbers))
        if len(places) + ranks > generators.MOST_RANKS:
            raise DescriptionError(at, f"there are more than {generators.MOST_RANKS} ranks")
        places += [RankLocation(name, place, which)] * ranks
        written += [number] * ranks
        if ranks > 1:
            memories[name] = _cable(host["memory"], at / "memory") if "memory" in host else generators.MEMORY
        rate = (
            quantity(bytes_per_s, host["memory_rate"], at / "memory_rate") if "memory_rate" in host else 0.0
        )
        here = Machine(machine, _whole(host.get("cores", 0), at / "cores", 0), rate)
        if place == len(machines):
            machines.append(here)
        for key, own, first in zip(("cores", "memory_rate"), here[1:], machines[place][1:], strict=True):
            if key in host and own != first:
                text = f"is {own:g}, and {first:g} in the first table of host {machine!r}, for all of it"
                raise DescriptionError(at / key, text)
    if not places:
        raise DescriptionError(top, "has no [[host]]")
    for number, switch in enumerate(_list(tables, "switch")):
        at = top / "switch" / number
        known(switch, at, {"name", "adds"})
        name = _name(switch, at, names)
        if "adds" in switch:
            adders.append((name, quantity(bytes_per_s, switch["adds"], at / "adds")))
    connections = _connections(tables, names)
    title = str(tables.get("name", "network"))
    try:
        return network_of(
            title, places, connections, machines, memories=memories, costs=tuple(costs), adders=adders
        )
    except ValueError as error:
        found = re.search(r"to rank (\d+)", str(error))
        where = top / "host" / written[int(found[1])] if found and found[1] != "0" else top
        raise DescriptionError(where, str(error)) from None


CABLE = ("latency", "rate", "duplex", "burst")
"""The keys of a cable."""


def _connections(tables: dict[str, Any], names: set[str]) -> list[Connection]:
    found = []
    for number, cable in enumerate(_list(tables, "cable")):
        at = At(("cable", number))
        known(cable, at, {"between", *CABLE, "back", "count"})
        between = cable.get("between")
        if not isinstance(between, list) or len(between) != 2 or between[0] == between[1]:
            raise DescriptionError(
                at / "between", f"is {between!r}, expected the names of two hosts or switches"
            )
        for end in between:
            if not isinstance(end, str) or end not in names:
                raise DescriptionError(at / "between", f"there is no host or switch {end!r}")
        plain = {key: value for key, value in cable.items() if key in CABLE}
        back = _cable(cable["back"], at / "back") if "back" in cable else None
        each = Connection((between[0], between[1]), _cable(plain, at), back)
        found += [each] * _whole(cable.get("count", 1), at / "count", 1, 1 << 10)
        if len(found) > MOST_CABLES:
            raise DescriptionError(at, f"there are more than {MOST_CABLES} cables")
    return found


# ---- values ------------------------------------------------------------------------------------------


def _cable(value: Any, at: At) -> Cable:
    if not isinstance(value, dict):
        raise DescriptionError(at, f"is {value!r}, expected {{ latency = '5 us', rate = '100 Gbit/s' }}")
    known(value, at, set(CABLE))
    if "rate" not in value:
        raise DescriptionError(at, "lacks a rate")
    duplex = value.get("duplex", "full")
    if duplex not in ("full", "half"):
        raise DescriptionError(at / "duplex", f"is {duplex!r}, expected 'full' or 'half'")
    latency = quantity(seconds, value.get("latency", 0), at / "latency")
    rate = quantity(bytes_per_s, value["rate"], at / "rate")
    return Cable(latency, rate, duplex, quantity(nbytes, value.get("burst", 0), at / "burst"))


def _whole(value: Any, at: At, least: int, most: int = generators.MOST_RANKS) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DescriptionError(at, f"is {value!r}, expected a whole number")
    if not least <= value <= most:
        raise DescriptionError(at, f"is {value}, expected {least}..{most}")
    return value


def _table(tables: dict[str, Any], key: str, at: At, keys: set[str] | None) -> dict[str, Any]:
    value = tables.get(key, {})
    if not isinstance(value, dict):
        raise DescriptionError(at / key, f"is {value!r}, expected a table [{key}]")
    if keys is not None:
        known(value, at / key, keys)
    return value


def _list(tables: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = tables.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DescriptionError(At((key,)), f"is {value!r}, expected tables [[{key}]]")
    return value


def _name(table: dict[str, Any], at: At, names: set[str]) -> str:
    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.\-:/]{1,64}", name):
        raise DescriptionError(at / "name", f"is {name!r}, expected up to 64 letters, digits and ._-:/")
    if name in names:
        raise DescriptionError(at / "name", f"{name!r} is the name of two nodes")
    names.add(name)
    return name
