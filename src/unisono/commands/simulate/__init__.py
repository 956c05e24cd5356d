"""`unisono simulate`: how long algorithms take on a network, the fastest first, and what limits each.

    trials     one simulation in a process of its own, with a limit of its time
    search     --best: hierarchies and segment sizes     report    table, JSON, timeline
    programs   a job of many calls, recorded or written

The networks are those of `unisono network`; docs/simulate.md is the tour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.engine.environment.env import parse_size
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.commands.simulate.trials import Trial, Wish
    from unisono.networks import Network

__all__ = ["add_arguments", "main"]

PATIENCE_S = 60.0
MOST_PATIENCE_S = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("collective", help="all_reduce, broadcast, all_gather ...; or JOB.json, a program (`run --record`)")
    add("--network", required=True, metavar="NET", help="FILE.toml, or a name that `unisono network` lists")
    add("-n", "--ranks", type=int, default=0, help="number of ranks (default: all of the network)")
    add("--bytes", default="8,64M", metavar="SIZES", help="sizes of the whole buffer (default 8,64M)")
    add(
        "--algorithm",
        default="all",
        metavar="NAMES",
        help="names, file.py:function or schedule files, with commas between; all: the catalogue (default)",
    )
    add("--replica", type=int, default=0, metavar="R", help="of a program: -n makes more of each R ranks")
    add("--root", type=int, default=0, help="root of rooted collectives (default 0)")
    add("--segment", default="", metavar="SIZE", help="bytes of a segment (default: as the engine cuts)")
    add("--slow", action="append", default=[], metavar="RANK=FACTOR", help="a straggler; may be repeated")
    add("--delay", action="append", default=[], metavar="RANK=SECONDS", help="a rank that begins later")
    add("--slow-link", action="append", default=[], metavar="LINK=FACTOR", help="a link that takes longer")
    add("--lost-link", action="append", default=[], metavar="LINK", help="a link that loses everything")
    add(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="seconds for one simulation (default 60)",
    )
    add("--best", action="store_true", help="also try hierarchies and segment sizes")
    add("-o", "--output", metavar="FILE", help="with --best: write the winner, for algorithm=FILE")
    add("--timeline", metavar="FILE", help="FILE.json: what ranks did, for Perfetto; FILE.svg: a picture")
    add("--json", action="store_true", help="the results on standard output as JSON")


def main(args: argparse.Namespace) -> int:
    """Simulate, and print the results.

    Exit code: 0; 1: nothing could be simulated, or a file cannot be written; 2: wrong usage.
    """
    try:
        return _simulated(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"unisono simulate: {error.filename or error}: {error.strerror}", file=sys.stderr)
        return 1
    except (UnisonoError, ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"unisono simulate: {error}", file=sys.stderr)
        return 2


def _simulated(args: argparse.Namespace) -> int:
    from unisono.commands.simulate.programs import is_program, simulate_job
    from unisono.commands.simulate.report import TrialProgress, as_json, table
    from unisono.commands.simulate.search import candidates, save
    from unisono.commands.simulate.trials import run, timeline

    if args.timeline and Path(args.timeline).suffix not in (".json", ".svg"):
        raise ValueError(f"--timeline {args.timeline}: expected a name that ends in .json or .svg")
    if is_program(args.collective):
        return simulate_job(args, _conditions(args))
    if args.replica:
        raise ValueError("--replica is for a program, such as `unisono run --record` writes")
    sizes = _sizes(args.bytes)
    network, wishes = _wishes(args, sizes[0])
    if args.output and not args.best:
        raise ValueError("-o needs --best: it writes the winner")
    trials: list[Trial] = []
    progress = TrialProgress()
    for nbytes in sizes:
        for wish in wishes:
            trials.append(run(network, wish._replace(nbytes=nbytes), args.patience))
            progress.show(trials[-1])
        if args.best:
            found = [trial for trial in trials if trial.wish.nbytes == nbytes and not trial.problem]
            for wish in candidates(network, found):
                trials.append(run(network, wish, args.patience))
                progress.show(trials[-1])
    done = sorted((trial for trial in trials if not trial.problem), key=lambda trial: trial.seconds)
    print(as_json(network, trials) if args.json else table(network, trials))
    if not done:
        return 1
    last = [trial for trial in trials if trial.wish.nbytes == sizes[-1]]
    winner = min((trial for trial in last if not trial.problem), key=lambda t: t.seconds, default=None)
    if winner is None:
        return 1
    if args.output:
        if left_out := sum(bool(trial.problem) for trial in last):
            what = (
                f"{left_out} of {len(last)} candidates have no result: {args.output} has the best other one"
            )
            print(what, file=sys.stderr)
        save(network, winner.wish, Path(args.output))
    if args.timeline:
        timeline(network, winner.wish, Path(args.timeline))
    return 0


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--bytes {text}: expected {error}, with commas between") from None


def _wishes(args: argparse.Namespace, nbytes: int) -> tuple[Network, list[Wish]]:
    """The network and what to simulate on it."""
    from unisono.commands.simulate.trials import Wish
    from unisono.networks import find
    from unisono.plans import ALGORITHMS, CONTRACTS

    if args.collective not in ALGORITHMS:
        raise ValueError(f"no collective {args.collective!r}: there are {', '.join(ALGORITHMS)}")
    if args.ranks < 0:
        raise ValueError(f"-n {args.ranks}: at least one rank")
    if not 0 < args.patience <= MOST_PATIENCE_S:
        raise ValueError(f"--patience {args.patience}: expected seconds above 0, {MOST_PATIENCE_S} at most")
    network = find(args.network, args.ranks)
    if args.ranks > network.size:
        raise ValueError(f"-n {args.ranks}: {network.name} has {network.size} ranks")
    network = network.first(args.ranks or network.size)
    if not 0 <= args.root < network.size:
        raise ValueError(f"--root {args.root}: ranks are 0 to {network.size - 1}")
    if args.root and not CONTRACTS[args.collective].rooted:
        raise ValueError(f"--root {args.root}: {args.collective} has no root")
    known = list(ALGORITHMS[args.collective])
    known += ["in_network"] if args.collective == "all_reduce" and network.switches else []
    names = known if args.algorithm == "all" else args.algorithm.split(",")
    for name in names:
        if not any(mark in name for mark in ".:/") and name not in known:
            raise ValueError(f"--algorithm {name}: {args.collective} has {', '.join(known)}")
    segment = _sizes(args.segment)[0] if args.segment else None
    conditions = _conditions(args)
    return network, [
        Wish(args.collective, name, nbytes, args.root, segment, (), conditions) for name in names
    ]


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "slow": _pairs(args.slow, "--slow", whole=True),
        "delay": _pairs(args.delay, "--delay", whole=True),
        "slow_links": _pairs(args.slow_link, "--slow-link", whole=False),
        "lost_links": tuple(args.lost_link),
    }


def _pairs(texts: list[str], option: str, *, whole: bool) -> dict[int | str, float]:
    found: dict[int | str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            found[int(name) if whole else name] = float(value)
        except ValueError:
            raise ValueError(f"{option} {text}: expected such as {'3=2.5' if whole else 'a>s=2'}") from None
    return found
