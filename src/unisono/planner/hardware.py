"""Hardware as data: accelerators, the links between them, and how much of their rates a training step gets.

The files are small; `shipped/` has some, with the sources of their figures. A cluster is hosts that differ:
of several kinds, each some equal hosts. Ranks are numbered kind by kind, in an order that a plan chooses.
Groups that span several kinds get the lowest rates and the smallest memory of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from unisono.engine.base.validation import flag, instance, not_negative, positive, text, whole
from unisono.networks.cost_table import known
from unisono.networks.places import At, DescriptionError, line_of
from unisono.networks.quantities import bytes_per_s, nbytes, readable_size, seconds
from unisono.networks.toml import tables_of, text_of

FOLDER = Path(__file__).parent / "shipped"
LEAST_FLOPS, LEAST_RATE, MOST_RATE, MOST_S = 1e6, 1e3, 1e24, 60.0
"""Of accelerators, memory and links: FLOP/s, bytes per second, and seconds of a latency or a kernel."""

COMPUTE = ("bf16", "fp16", "f32", "fp8")
Described = TypeVar("Described")


class LinkRate(NamedTuple):
    """What a rank sends over: `latency_s` of a message, `bytes_per_s` in one direction."""

    latency_s: float
    bytes_per_s: float


class Interconnect(NamedTuple):
    """Equal hosts: `ranks` of each, a rank's link `inside`, and its share of the ports `between` hosts."""

    name: str
    ranks: int
    inside: LinkRate
    between: LinkRate


class HostMemory(NamedTuple):
    """What swapping uses: a rank's share of the host's memory, and its link there, in each direction."""

    nbytes: int
    bytes_per_s: float


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The share of each rate that a training step gets: at most four numbers that are fitted or assumed.

    Attributes:
        matrix: of the rate of matrix products.  memory: of the memory's rate.  links: of the links' rates.
        attention: of the rate of matrix products, in fused attention; 0: as `matrix`. It is not fitted.
        kernel_s: seconds that each kernel takes beside its work.
        source: where the four come from.
    Raises:
        TypeError, ValueError: a number is none, or not above 0; `kernel_s` and `attention` may be 0.
    """

    matrix: float
    memory: float
    links: float
    kernel_s: float
    source: str
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name in ("matrix", "memory", "links"):
            positive(getattr(self, name), f"efficiency.{name}")
        for name in ("kernel_s", "attention"):
            not_negative(getattr(self, name), f"efficiency.{name}")
        text(self.source, "efficiency.source")


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator and its links.

    Attributes:
        name: for people.
        flops: of matrix products, by type of compute: bf16, fp16, f32, fp8; the first one is the default.
        memory_bytes: of one accelerator.
        reserved_bytes: what driver, libraries and fragmentation take of it.
        memory_bytes_per_s: the rate of its memory.
        ranks: accelerators of a host.  inside, between: a rank's links within a host and between hosts.
        overlap: gradients are reduced during backward.
        host: the host's memory, for swapping; None: the file does not say.
    Raises:
        TypeError, ValueError: numbers that no accelerator has.
    """

    name: str
    flops: dict[str, float]
    memory_bytes: int
    reserved_bytes: int
    memory_bytes_per_s: float
    ranks: int
    inside: LinkRate
    between: LinkRate
    overlap: bool
    efficiency: Efficiency
    host: HostMemory | None = None

    def __post_init__(self) -> None:
        text(self.name, "hardware.name")
        whole(self.memory_bytes, "hardware.memory_bytes", 1)
        whole(self.reserved_bytes, "hardware.reserved_bytes", 0, self.memory_bytes - 1)
        whole(self.ranks, "hardware.ranks", 1)
        flag(self.overlap, "hardware.overlap")
        instance(self.efficiency, Efficiency, "hardware.efficiency")
        if not instance(self.flops, dict, "hardware.flops"):
            raise ValueError(f"hardware.flops is empty, expected one of {', '.join(COMPUTE)}")
        for kind, rate in self.flops.items():
            if kind not in COMPUTE:
                raise ValueError(f"hardware.flops has {kind!r}, expected {', '.join(COMPUTE)}")
            positive(rate, f"hardware.flops of {kind}")
        positive(self.memory_bytes_per_s, "hardware.memory_bytes_per_s")
        for name in ("inside", "between"):
            link = instance(getattr(self, name), LinkRate, f"hardware.{name}")
            not_negative(link.latency_s, f"hardware.{name}.latency_s")
            positive(link.bytes_per_s, f"hardware.{name}.bytes_per_s")
        if self.host is not None:
            whole(instance(self.host, HostMemory, "hardware.host").nbytes, "hardware.host.nbytes", 0)
            positive(self.host.bytes_per_s, "hardware.host.bytes_per_s")

    @property
    def compute(self) -> str:
        """The type of compute that is the default."""
        return next(iter(self.flops))

    @property
    def usable_bytes(self) -> int:
        """What a plan may use."""
        return self.memory_bytes - self.reserved_bytes

    def limited(self, limit_bytes: int) -> Hardware:
        """The same where a plan may use so much, or all that there is."""
        least = min(limit_bytes, self.memory_bytes)
        return msgspec.structs.replace(self, memory_bytes=least, reserved_bytes=0)

    def check_limit(self, limit_bytes: int, who: str = "") -> None:
        """Raise ValueError where a plan may use more than there is."""
        if limit_bytes > self.memory_bytes:
            given, have = readable_size(limit_bytes), readable_size(self.memory_bytes)
            raise ValueError(f"{who}memory is {given}, and {self.name} has {have}")


def shipped() -> list[str]:
    """The names of the hardware that is shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find_hardware(name: Hardware | str | Path) -> Hardware:
    """The hardware in a file, or the shipped one of this name; or as it is given.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong, or no hardware has this name.
        TypeError: it is none of these.
    """
    instance(name, (Hardware, str, Path), "hardware")
    if isinstance(name, Hardware):
        return name
    if isinstance(name, str) and "," in name:
        raise ValueError(f"hardware is {name!r}: hosts that differ are given as hosts: 4xa100-80g,2xh100-80g")
    if isinstance(name, Path) or "/" in name or name.endswith(".toml"):
        file = Path(name)
    elif name not in shipped():
        raise ValueError(f"no hardware {name!r}: expected a file, or one of {', '.join(shipped())}")
    else:
        file = FOLDER / f"{name}.toml"
    return described(file, lambda tables: _hardware(tables, file.stem))


def described(file: Path, read: Callable[[dict[str, Any]], Described]) -> Described:
    """What a TOML file describes; a ValueError of `read` says in which line it is wrong."""
    text = text_of(file)
    tables = tables_of(text, str(file))
    try:
        return read(tables)
    except DescriptionError as error:
        raise ValueError(f"{file}:{line_of(text, error.at)}: {error.at}: {error}") from None


Reader = Callable[[Any], Any]
"""It gives what a value of a file says, or raises ValueError or TypeError."""


def _read(
    table: object, at: At, needed: Mapping[str, Reader], others: Mapping[str, Reader] = MappingProxyType({})
) -> dict[str, Any]:
    """The values of a table, each as its reader gives it.

    Raises:
        DescriptionError: a key is unknown or is missing, or a reader refuses its value.
    """
    if not isinstance(table, dict):
        raise DescriptionError(at, f"is {table!r}, expected a table")
    known(table, at, {*needed, *others})
    for key in needed:
        if key not in table:
            raise DescriptionError(at, f"lacks {key}")
    found = {}
    for key, value in table.items():
        try:
            found[key] = {**needed, **others}[key](value)
        except (ValueError, TypeError) as error:
            raise DescriptionError(at / key, str(error)) from None
    return found


def _of_type(kind: type, expected: str) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"is {value!r}, expected {expected}")
        return value

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"is {value!r}, expected a number")
    return float(value)


def _within(read: Reader, least: float, most: float, unit: str) -> Reader:
    def checked(value: Any) -> float:
        number = float(read(value))
        if not least <= number <= most:
            raise ValueError(f"is {number:g}, expected {least:g} to {most:g} {unit}")
        return number

    return checked


def _share(value: Any) -> float:
    if not 0 < (share := _number(value)) <= 1:
        raise ValueError(f"is {value!r}, expected a share above 0, at most 1")
    return share


_text, _flag = _of_type(str, "a text"), _of_type(bool, "true or false")
_rate = _within(bytes_per_s, LEAST_RATE, MOST_RATE, "bytes per second")
_time = _within(seconds, 0, MOST_S, "s")
_flops = _within(_number, LEAST_FLOPS, MOST_RATE, "FLOP/s")


def _hardware(tables: dict[str, Any], name: str) -> Hardware:
    top, table = At(()), lambda value: value
    given = _read(
        tables,
        top,
        {
            "memory": nbytes, "memory_rate": _rate, "ranks": lambda value: whole(value, "ranks", 1),
            **dict.fromkeys(("flops", "inside", "between", "efficiency"), table),
        },
        {"name": _text, "reserved": nbytes, "overlap": _flag, "host": table},
    )  # fmt: skip
    memory, reserved = given["memory"], given.get("reserved", 0)
    if reserved >= memory:
        raise DescriptionError(top / "reserved", f"is {reserved}, expected less than the memory, {memory}")
    flops = _read(given["flops"], at := top / "flops", {}, dict.fromkeys(COMPUTE, _flops))
    if not flops:
        raise DescriptionError(at, f"is empty, expected one of {', '.join(COMPUTE)}")
    if "fp8" in flops and next(iter(flops)) != "bf16":
        raise DescriptionError(at / "fp8", "needs bf16 before it, in which the rest is computed")
    inside, between = (
        _read(given[key], top / key, {"rate": _rate}, {"latency": _time}) for key in ("inside", "between")
    )
    shares = {"matrix": _share, "memory": _share, "links": _share, "kernel": _time, "source": _text}
    efficiency = _read(given["efficiency"], top / "efficiency", shares, {"attention": _share})
    host = None
    if "host" in given:
        found = _read(given["host"], top / "host", {"memory": nbytes, "rate": _rate})
        host = HostMemory(found["memory"] // given["ranks"], found["rate"])
    return Hardware(
        name=given.get("name", name),
        flops=flops,
        memory_bytes=memory,
        reserved_bytes=reserved,
        memory_bytes_per_s=given["memory_rate"],
        ranks=given["ranks"],
        inside=LinkRate(inside.get("latency", 0.0), inside["rate"]),
        between=LinkRate(between.get("latency", 0.0), between["rate"]),
        overlap=given.get("overlap", True),
        efficiency=Efficiency(kernel_s=efficiency.pop("kernel"), **efficiency),
        host=host,
    )


MOST_KINDS, MOST_HOSTS = 3, 1 << 20
ENTRY = re.compile(r"([0-9]{1,7})x(.+)")

Hosts = str | Path | Sequence[tuple[int, Hardware | str | Path]]
"""A text such as "4xa100-40g,2xh100-80g", a file that lists them, or pairs of a number and hardware."""


# ---- hosts that differ -----------------------------------------------------------------------------------


class HostKind(NamedTuple):
    """Some equal hosts."""

    hosts: int
    hardware: Hardware

    @property
    def ranks(self) -> int:
        """Ranks on all of them."""
        return self.hosts * self.hardware.ranks


class KindRanks(NamedTuple):
    """Ranks `begin` to `end` of a job are on hosts of one kind."""

    kind: int
    begin: int
    end: int


class Cluster(NamedTuple):
    """Hosts of several kinds."""

    kinds: tuple[HostKind, ...]

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return sum(kind.ranks for kind in self.kinds)

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """All orders in which a plan can number the kinds."""
        return list(permutations(range(len(self.kinds))))

    @property
    def name(self) -> str:
        """Such as "4 x a100-40g + 2 x h100-80g"."""
        return " + ".join(f"{kind.hosts} x {kind.hardware.name}" for kind in self.kinds)

    def placed(self, order: tuple[int, ...]) -> list[KindRanks]:
        """The ranks of each kind, in this order; (): as they were given."""
        order = order or tuple(range(len(self.kinds)))
        ends = list(accumulate(self.kinds[kind].ranks for kind in order))
        begins = [0, *ends[:-1]]
        return [KindRanks(*each) for each in zip(order, begins, ends, strict=True)]

    def blocks(self, order: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
        """The kinds on which each of `count` equal blocks of ranks lies.

        Example: 2 hosts of kind 0 and 1 of kind 1, of 8 ranks each: blocks((), 3) == [(0,), (0,), (1,)];
        blocks((), 2) == [(0,), (0, 1)].
        """
        size, placed = self.ranks // count, self.placed(order)
        return [
            tuple(sorted(k for k, begin, end in placed if begin < (at + 1) * size and at * size < end))
            for at in range(count)
        ]

    def slowest(self, kinds: Iterable[int] = ()) -> Hardware:
        """What ranks on these kinds have in common; (): on all."""
        return slowest([self.kinds[kind].hardware for kind in kinds or range(len(self.kinds))])


def slowest(several: Sequence[Hardware]) -> Hardware:
    """Hardware with the lowest rates, the least memory and the fewest ranks of these. It swaps nothing.

    Rates are compared with their efficiencies: what a step gets of them.

    Raises:
        ValueError: they have no type of compute in common.
    """
    if len(several) == 1:
        return msgspec.structs.replace(several[0], host=None)
    shares = [each.efficiency for each in several]
    types = [name for name in several[0].flops if all(name in each.flops for each in several)]
    name = " + ".join(dict.fromkeys(each.name for each in several))
    if not types:
        raise ValueError(f"hosts: {name} have no type of compute in common")
    sources = dict.fromkeys(each.efficiency.source for each in several)

    def link(name: str) -> LinkRate:
        links: list[LinkRate] = [getattr(each, name) for each in several]
        rate = min(each.bytes_per_s * share.links for each, share in zip(links, shares, strict=True))
        return LinkRate(max(each.latency_s for each in links), rate)

    flops = {name: min(each.flops[name] * each.efficiency.matrix for each in several) for name in types}
    slow = min(each.flops[types[0]] * _attention(each.efficiency) for each in several)
    return Hardware(
        name=name,
        flops=flops,
        memory_bytes=min(each.usable_bytes for each in several),
        reserved_bytes=0,
        memory_bytes_per_s=min(each.memory_bytes_per_s * each.efficiency.memory for each in several),
        ranks=min(each.ranks for each in several),
        inside=link("inside"),
        between=link("between"),
        overlap=all(each.overlap for each in several),
        efficiency=Efficiency(
            attention=slow / flops[types[0]],
            matrix=1.0,
            memory=1.0,
            links=1.0,
            kernel_s=max(each.kernel_s for each in shares),
            source="; ".join(sources),
        ),
    )


def _attention(efficiency: Efficiency) -> float:
    return efficiency.attention or efficiency.matrix


def find_cluster(hosts: Hosts) -> Cluster:
    """The cluster of a text, a file or pairs.

    A file is TOML: `[[hosts]]` with `count` and `hardware` (a name, or a file beside this one), and where
    they differ from that: `memory`, which plans may use of a rank, and `speed`, the share of the rates of
    compute and memory that these hosts get, above 0 and at most 1.

    Raises:
        OSError: a file cannot be read.  ValueError, TypeError: there are no such hosts.
    """
    if isinstance(hosts, Path) or (
        isinstance(hosts, str) and hosts.endswith(".toml") and not ENTRY.fullmatch(hosts)
    ):
        file = Path(hosts)
        kinds = described(file, lambda tables: _kinds(tables, file.parent))
    elif isinstance(hosts, str):
        kinds = list(map(_pair, hosts.split(",")))
    elif isinstance(hosts, (list, tuple)):
        kinds = list(map(_pair, hosts))
    else:
        kind = type(hosts).__name__
        raise TypeError(f"hosts is a {kind}, expected a text, a Path or pairs (count, hardware)")
    if not 1 <= len(kinds) <= MOST_KINDS:
        raise ValueError(f"hosts: {len(kinds)} kinds, expected 1 to {MOST_KINDS}")
    found = Cluster(tuple(kinds))
    found.slowest()  # or raise: they have no type of compute in common
    return found


def _pair(each: object) -> HostKind:
    if isinstance(each, str):
        if (found := ENTRY.fullmatch(each.strip())) is None:
            raise ValueError(f"hosts: {each.strip()!r}, expected such as 4xa100-80g,2xh100-80g, or a file")
        each = int(found[1]), found[2]
    if not isinstance(each, (list, tuple)) or len(each) != 2:
        raise TypeError(f"hosts: {each!r} is no pair (count, hardware)")
    count, hardware = int(whole(each[0], "hosts: a count", 1, MOST_HOSTS)), each[1]
    instance(hardware, (Hardware, str, Path), "hosts: hardware")
    return HostKind(count, find_hardware(hardware))


def _kinds(tables: dict[str, Any], folder: Path) -> list[HostKind]:
    listed = _read(tables, At(()), {}, {"hosts": lambda value: value}).get("hosts")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise DescriptionError(At(()), "lacks [[hosts]]")
    return [_kind(each, At(("hosts", at)), folder) for at, each in enumerate(listed)]


def _kind(table: dict[str, Any], at: At, folder: Path) -> HostKind:
    def hardware(name: Any) -> Hardware:
        return find_hardware(folder / _text(name) if _text(name).endswith(".toml") else name)

    count = {"count": lambda value: int(whole(value, "count", 1, MOST_HOSTS)), "hardware": hardware}
    given = _read(table, at, count, {"memory": nbytes, "speed": _share})
    found, limit, speed = given["hardware"], given.get("memory"), given.get("speed", 1.0)
    if limit is not None:
        if not 0 < limit <= found.memory_bytes:
            raise DescriptionError(at / "memory", f"is {limit}, expected 1 to {found.memory_bytes} bytes")
        found = found.limited(limit)
    if speed != 1:
        found = msgspec.structs.replace(
            found,
            name=f"{found.name} at {speed:g}",
            flops={name: rate * speed for name, rate in found.flops.items()},
            memory_bytes_per_s=found.memory_bytes_per_s * speed,
        )
    return HostKind(given["count"], found)
