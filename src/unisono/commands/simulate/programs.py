"""`unisono simulate JOB.json`: a recorded or written program on a network."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.networks.quantities import written_time

if TYPE_CHECKING:
    from unisono.simulation import Program, Result

__all__ = ["is_program", "simulate_job"]

MOST_SPANS = 200_000


def is_program(name: str) -> bool:
    """Whether the command's first argument is a file of a program, not the name of a collective."""
    return name.endswith(".json")


def simulate_job(args: argparse.Namespace, conditions: dict[str, Any]) -> int:
    """Simulate it, and print the result.

    Raises:
        ValueError: the file or an option is wrong.  OSError: it cannot be read.
    """
    from unisono.commands.simulate.timeline import perfetto, svg
    from unisono.networks import find
    from unisono.simulation import read_program, scaled, simulate_program

    if args.best or args.output:
        raise ValueError("--best and -o are for one collective, not for a program")
    program = read_program(args.collective)
    several = len(program.ranks) > 1
    if args.replica and not several:
        raise ValueError("--replica: in this program all ranks do the same, so -n alone says how many")
    if args.replica:
        program = scaled(program, args.ranks or len(program.ranks), args.replica)
    elif several and args.ranks not in (0, len(program.ranks)):
        raise ValueError(
            f"-n {args.ranks}: the program is one of {len(program.ranks)} ranks; --replica R makes more of "
            "every R ranks"
        )
    size = len(program.ranks) if several else args.ranks
    network = find(args.network, size)
    found = simulate_program(
        program, network, size=size or None, timeline=MOST_SPANS if args.timeline else 0, **conditions
    )
    print(json.dumps(_record(found)) if args.json else _text(program, found))
    if args.timeline:
        file = Path(args.timeline)
        picture = svg(found) if file.suffix == ".svg" else json.dumps(perfetto(found))
        file.write_text(picture, encoding="utf-8")
    return 0


def _record(result: Result) -> dict[str, Any]:
    parts = result.breakdown._asdict()
    return {
        "network": result.network,
        "ranks": result.size,
        "program": result.name,
        "seconds": result.seconds,
        "messages": result.messages,
        "limit": str(result.limit),
        "limit_seconds": result.limit.seconds,
        **{f"{name.removesuffix('_s')}_seconds": value for name, value in parts.items()},
        "slowest_rank": result.slowest,
    }


def _text(program: Program, result: Result) -> str:
    from unisono.simulation import Call

    calls = Counter(item.collective for item in program.of(result.slowest) if isinstance(item, Call))
    made = ", ".join(f"{count} {name}" for name, count in calls.most_common())
    lines = [
        f"{result.name} on {result.network}, {result.size} ranks: {_short(result.seconds)}",
        f"  {result.messages} messages; rank {result.slowest} ends last; its calls: {made or 'none'}",
        f"  limit: {result.limit}, {_short(result.limit.seconds)}",
        "  longest chain: "
        + ", ".join(
            f"{name.removesuffix('_s')} {value / result.seconds if result.seconds else 0:.0%}"
            for name, value in result.breakdown._asdict().items()
        ),
    ]
    return "\n".join(lines)


def _short(seconds: float) -> str:
    return written_time(float(f"{seconds:.4g}"))
