"""Hosts that differ: kinds of them, how they are written, and which ranks lie on which.

A kind is some equal hosts. Ranks are numbered kind by kind, in an order that a plan chooses. Groups that span
several kinds get the lowest rates and the smallest memory of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from unisono.engine.base.validation import instance, whole
from unisono.networks.cost_table import known, quantity
from unisono.networks.places import At, DescriptionError
from unisono.networks.quantities import nbytes
from unisono.planner.hardware import Efficiency, Hardware, LinkRate, described, find_hardware

__all__ = ["Cluster", "HostKind", "Hosts", "KindRanks", "find_cluster", "slowest"]

MOST_KINDS, MOST_HOSTS = 3, 1 << 20
ENTRY = re.compile(r"([0-9]{1,7})x(.+)")
KEYS = {"count", "hardware", "memory", "speed"}

Hosts = str | Path | Sequence[tuple[int, Hardware | str | Path]]
"""A text such as "4xa100-40g,2xh100-80g", a file that lists them, or pairs of a number and hardware."""


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
        kinds = described(file, lambda tables: _read(tables, file.parent))
    elif isinstance(hosts, str):
        kinds = [_pair(_entry(text.strip())) for text in hosts.split(",")]
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


def _entry(text: str) -> tuple[int, str]:
    found = ENTRY.fullmatch(text)
    if not found:
        raise ValueError(f"hosts: {text!r}, expected such as 4xa100-80g,2xh100-80g, or a file")
    return int(found[1]), found[2]


def _pair(each: object) -> HostKind:
    if not isinstance(each, (list, tuple)) or len(each) != 2:
        raise TypeError(f"hosts: {each!r} is no pair (count, hardware)")
    count, hardware = int(whole(each[0], "hosts: a count", 1, MOST_HOSTS)), each[1]
    instance(hardware, (Hardware, str, Path), "hosts: hardware")
    return HostKind(count, find_hardware(hardware))


def _read(tables: dict[str, Any], folder: Path) -> list[HostKind]:
    known(tables, At(()), {"hosts"})
    listed = tables.get("hosts")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise DescriptionError(At(()), "lacks [[hosts]]")
    return [_kind(each, At(("hosts", at)), folder) for at, each in enumerate(listed)]


def _kind(table: dict[str, Any], at: At, folder: Path) -> HostKind:
    known(table, at, KEYS)
    for key in ("count", "hardware"):
        if key not in table:
            raise DescriptionError(at, f"lacks {key}")
    name = table["hardware"]
    if not isinstance(name, str):
        raise DescriptionError(at / "hardware", f"is {name!r}, expected a name or a file")
    try:
        found = find_hardware(folder / name if name.endswith(".toml") else name)
        count = int(whole(table["count"], "count", 1, MOST_HOSTS))
    except (ValueError, TypeError) as error:
        raise DescriptionError(at, str(error)) from None
    if "memory" in table:
        limit = quantity(nbytes, table["memory"], at / "memory")
        if not 0 < limit <= found.memory_bytes:
            raise DescriptionError(at / "memory", f"is {limit}, expected 1 to {found.memory_bytes} bytes")
        found = found.limited(limit)
    speed = table.get("speed", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed <= 1:
        raise DescriptionError(at / "speed", f"is {speed!r}, expected a share above 0, at most 1")
    if speed != 1:
        found = msgspec.structs.replace(
            found,
            name=f"{found.name} at {float(speed):g}",
            flops={name: rate * speed for name, rate in found.flops.items()},
            memory_bytes_per_s=found.memory_bytes_per_s * speed,
        )
    return HostKind(count, found)
