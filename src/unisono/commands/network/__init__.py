"""`unisono network`: checks a network, describes it, draws it, and turns other formats into TOML.

picture   the drawing as SVG
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.networks import Network

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "network",
        nargs="?",
        default="",
        metavar="NET",
        help="a file: .toml, .yaml or .json (InfraGraph), .xml (NCCL, hwloc); or a name; none: list them",
    )
    add("-n", "--ranks", type=int, default=0, help="ranks that are needed, where the network can grow")
    add("--route", default="", metavar="A,B", help="also the links from rank A to rank B")
    add("-o", "--output", metavar="FILE", help="FILE.svg: a picture; FILE.toml: the network, link by link")
    add("--json", action="store_true", help="the description on standard output as JSON")


def main(args: argparse.Namespace) -> int:
    """Check a network and describe it.

    Exit code: 0; 1: a file cannot be read or written; 2: wrong usage, or the network is wrong.
    """
    try:
        return _described(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"unisono network: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"unisono network: {error}", file=sys.stderr)
        return 2


def _described(args: argparse.Namespace) -> int:
    from unisono.networks import find
    from unisono.networks.found import shipped

    if not args.network:
        for name in shipped():
            network = find(name)
            print(f"  {name:<10} {network.size:>6} ranks on {len(network.machines):>5} hosts")
        return 0
    network = find(args.network, args.ranks)
    route = _route(network, args.route) if args.route else None
    if args.output:
        Path(args.output).write_text(_written(network, Path(args.output)), encoding="utf-8")
    record = dict(_record(network, route))
    print(json.dumps(record, indent=1) if args.json else "\n".join(_lines(network, route)))
    return 0


def _route(network: Network, text: str) -> list[int]:
    source, _, target = text.partition(",")
    if not (source.isdecimal() and target.isdecimal()):
        raise ValueError(f"--route {text}: expected two ranks, such as 0,5")
    return list(network.route(int(source), int(target)))


def _written(network: Network, file: Path) -> str:
    from unisono.commands.network.picture import svg
    from unisono.networks.writer import toml

    writers = {".svg": svg, ".toml": toml}
    if file.suffix not in writers:
        raise ValueError(f"-o {file}: expected a name that ends in .svg or .toml")
    return writers[file.suffix](network)


def _kinds(network: Network) -> Counter[tuple[float, float, str]]:
    counts: Counter[tuple[float, float, str]] = Counter()
    for family in network.links.families:
        counts[family.latency_s, family.bytes_per_s, family.duplex] += family.total
    return counts


def _lines(network: Network, route: list[int] | None) -> Iterator[str]:
    from unisono.networks.quantities import written_rate, written_time

    hosts = len(network.machines)
    yield f"{network.name}: {network.size} ranks on {hosts} hosts, {len(network.links)} links"
    for (latency, rate, duplex), count in _kinds(network).items():
        yield f"  {count:>7} links of {written_time(latency)}, {written_rate(rate)}, {duplex} duplex"
    if network.switches:
        names = ", ".join(each.name for each in network.switches[:8])
        yield f"  {len(network.switches)} switches that add: {names}"
    if network.symmetry is not None and network.symmetry.order > 1:
        axes = ", ".join(f"{axis.name} {axis.size} ({axis.kind})" for axis in network.symmetry.axes)
        yield f"  symmetry: {axes}"
    if network.size > 1:
        last = network.size - 1
        links, whole = len(network.route(0, last)), written_time(network.latency_s(0, last))
        yield f"  rank 0 to rank {last}: {links} links, {whole}"
    for link in route or ():
        each = network.links[link]
        yield f"  link {link}: {each.name}, {written_time(each.latency_s)}, {written_rate(each.bytes_per_s)}"


def _record(network: Network, route: list[int] | None) -> Iterator[tuple[str, object]]:
    yield "name", network.name
    yield "ranks", network.size
    yield "hosts", len(network.machines)
    yield "links", len(network.links)
    yield (
        "kinds",
        [
            {"latency_s": latency, "bytes_per_s": rate, "duplex": duplex, "count": count}
            for (latency, rate, duplex), count in _kinds(network).items()
        ],
    )
    yield "switches", [each._asdict() for each in network.switches]
    yield "symmetry", [each._asdict() for each in network.symmetry.axes] if network.symmetry else []
    if route is not None:
        yield "route", [network.links[link]._asdict() for link in route]
