"""`unisono draw`: an algorithm as a picture, from its plan.

    picture   the data: the messages of each round, what each rank holds, the cost
    diagram   the space-time diagram as SVG     page   the same as an HTML page, round by round     colours

It draws plans of the catalogue, and the caller's own; the fields of --json are in docs/new-algorithm.md.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.engine.environment.env import parse_size
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.commands.drawing.trace import PlanTrace
    from unisono.engine.costs.machine import MachineCalibration
    from unisono.plans import Plan, StepFunction

__all__ = ["add_arguments", "main"]

RANKS = 4
SUFFIXES = (".svg", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("collective", help="all_reduce, broadcast, all_gather ...")
    add(
        "--algorithm",
        default="",
        metavar="NAME",
        help="a name of the catalogue, or file.py:function (default: the cost model's choice)",
    )
    add("-n", "--ranks", type=int, help=f"number of ranks (default {RANKS})")
    add(
        "--hosts",
        default="",
        metavar="HOSTS",
        help="2x3: two hosts of three ranks; 3+2+1: ranks per host; 0,1,0,1: host of each rank",
    )
    add("--root", type=int, default=0, help="root of rooted collectives (default 0)")
    add(
        "--bytes",
        default="1M",
        metavar="SIZE",
        help="size of the whole buffer, for the predicted times (default 1M)",
    )
    add("-o", "--output", metavar="FILE", help="FILE.svg: all rounds; FILE.html: one by one")
    add("--json", action="store_true", help="the picture's data on standard output")


def main(args: argparse.Namespace) -> int:
    """Draw, and print the file's name, or the data.

    Exit code: 0; 1: a file cannot be written; 2: wrong usage, or a wrong plan.
    """
    try:
        text = _drawn(args)
    except (UnisonoError, ValueError, TypeError) as error:
        print(f"unisono draw: {error}", file=sys.stderr)
        return 2
    if args.output:
        try:
            Path(args.output).write_text(text[args.output], encoding="utf-8")
        except OSError as error:
            print(f"unisono draw: {args.output}: {error.strerror}", file=sys.stderr)
            return 1
    print(text["json"] if args.json else args.output)
    return 0


def _drawn(args: argparse.Namespace) -> dict[str, str]:
    """The requested outputs: file name or "json" -> text."""
    from unisono.commands.drawing.diagram import svg
    from unisono.commands.drawing.page import html
    from unisono.commands.drawing.trace import trace_plan

    writers: dict[str, Callable[[PlanTrace], str]] = {".svg": svg, ".html": html}
    suffix = Path(args.output).suffix if args.output else ""
    if args.output and suffix not in SUFFIXES:
        raise ValueError(f"-o {args.output}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if not args.output and not args.json:
        raise ValueError("no output: give -o FILE.svg, -o FILE.html or --json")
    machine = _machine()
    try:
        nbytes = parse_size(args.bytes)
    except ValueError as error:
        raise ValueError(f"--bytes {args.bytes}: expected {error}") from None
    picture = trace_plan(_plan(args, nbytes, machine), nbytes, machine)
    found = {"json": json.dumps(picture.record(), indent=1)} if args.json else {}
    if args.output:
        found[args.output] = writers[suffix](picture)
    return found


def _machine() -> MachineCalibration:
    from unisono.engine.costs.machine import recall
    from unisono.engine.environment import env

    return recall(env.read()).calibration


def _plan(args: argparse.Namespace, nbytes: int, machine: MachineCalibration) -> Plan:
    from unisono.commands.drawing.diagram import MOST_RANKS, check
    from unisono.engine.costs.tuner import Tuner
    from unisono.plans import ALGORITHMS, CONTRACTS, make
    from unisono.plans.custom import write

    if args.collective not in ALGORITHMS:
        raise ValueError(f"no collective {args.collective!r}: there are {', '.join(ALGORITHMS)}")
    hosts = _hosts(args.hosts)
    size = len(hosts) or (RANKS if args.ranks is None else args.ranks)
    if args.ranks not in (None, size):
        raise ValueError(f"--hosts {args.hosts} are {size} ranks, -n says {args.ranks}")
    if size < 1:
        raise ValueError(f"-n {size}: at least one rank")
    if args.output:
        check(size, MOST_RANKS, "ranks")
    if not 0 <= args.root < size:
        raise ValueError(f"--root {args.root}: ranks are 0 to {size - 1}")
    if args.root and not CONTRACTS[args.collective].rooted:
        raise ValueError(f"--root {args.root}: {args.collective} has no root")
    if ":" in args.algorithm:
        function = _own(args.algorithm)
        try:
            return write(args.collective, function, size, args.root, hosts)
        except (TypeError, ValueError):
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"--algorithm {args.algorithm}: {type(error).__name__}: {error}") from error
    algorithm = args.algorithm or Tuner(size, hosts, machine).choose(args.collective, nbytes)
    return make(args.collective, algorithm, size, args.root, hosts)


def _hosts(text: str) -> tuple[int, ...]:
    """The host of each rank. Examples: "2x2" -> (0, 0, 1, 1), "2+1" -> (0, 0, 1), "0,1,0" -> (0, 1, 0)."""
    if not text:
        return ()
    if found := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text):
        return tuple(host for host in range(int(found[1])) for _ in range(int(found[2])))
    if re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3})*", text):
        return tuple(host for host, count in enumerate(text.split("+")) for _ in range(int(count)))
    if re.fullmatch(r"\d{1,4}(,\d{1,4})+", text):
        return tuple(map(int, text.split(",")))
    raise ValueError(f"--hosts {text}: expected 2x3, 3+2+1, or the host of each rank as 0,0,1")


def _own(text: str) -> StepFunction:
    """The function that file.py:function names."""
    file, _, name = text.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--algorithm {text}: there is no file {file}")
    try:
        found = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--algorithm {text}: {file} fails: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"--algorithm {text}: {file} has no function {name}")
    function: StepFunction = found
    return function
