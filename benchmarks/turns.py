"""What the programs of this folder share: ranks with several ways of doing something, which take turns.

A side is a set of processes, here or on hosts (network namespaces) of this machine; all sides but one sit
still. A turn is a block of one way on one side. A figure is the median over rounds of the round's median, of
the slowest rank; a ratio is the median of the ratios within the rounds. See docs/bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hosts  # noqa: E402  (from tests/support)
from unisono.commands.bench.measure import Timing  # noqa: E402
from unisono.commands.bench.noise import CpuMeter, ticks_of  # noqa: E402
from unisono.commands.bench.report import noise_line  # noqa: E402
from unisono.commands.bench.worker import Answer, BenchWorker  # noqa: E402
from unisono.commands.bench.worker import main as worker_main  # noqa: E402
from unisono.commands.bench.worker_group import WorkerGroup  # noqa: E402

PORTS = {"unisono": 29500, "gloo": 29501, "before": 29502, "unisono-torch": 29503}
"""The port of the rendezvous on the first host, where all ports are free."""


class TurnWorker(BenchWorker):
    """A rank with a call for each way; `way` chooses the one that a block times."""

    COMMANDS = (*BenchWorker.COMMANDS, "way")

    def __init__(self, command: dict[str, Any]) -> None:
        super().__init__(command)
        self.ways: dict[str, Callable[[], Any]] = {}

    def way(self, name: str) -> Answer:
        """Choose."""
        self.call = self.ways[name]
        return {}


class HostWorkerGroup(WorkerGroup):
    """A side with `per_host` ranks on each host.

    Args:
        token: the file of the job's token.  python: the interpreter of another installation.
    """

    def __init__(
        self,
        name: str,
        net: hosts.Network,
        per_host: int,
        token: str,
        python: str = sys.executable,
        **more: Any,
    ) -> None:
        super().__init__(name, len(net) * per_host, **more)
        self.contender = "unisono" if name == "before" else name
        self._net, self._per_host, self._python = net, per_host, python
        self._settings = [f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}", f"UNISONO_TOKEN_FILE={token}"]

    @contextmanager
    def _meeting_point(self) -> Iterator[str]:
        yield f"{self._net[0].address}:{PORTS[self.name]}"

    def _command(self, rank: int, words: list[str]) -> list[str]:
        return self._net[rank // self._per_host].command([*self._settings, self._python, *words])


@contextmanager
def network(count: int, rate: str) -> Iterator[tuple[hosts.Network, str]]:
    """Hosts with links of a rate ("": no limit), and the file of a token for their jobs."""
    with tempfile.NamedTemporaryFile("w", prefix="token-") as token, hosts.hosts(count, rate=rate) as net:
        print(secrets.token_hex(), file=token, flush=True)
        yield net, token.name


def bytes_sent(net: hosts.Network) -> list[int]:
    """The bytes that each host has sent so far, headers included."""
    return [node.traffic().sent for node in net]


def ranks_run(program: str) -> tuple[str, ...]:
    """What Python runs as a rank of a program that ends with `start`."""
    return (os.path.abspath(program), "--worker")


@contextmanager
def started(sides: Sequence[WorkerGroup]) -> Iterator[None]:
    """Start sides; print at the end whether the machine was quiet."""
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side)
        with metered(sides):
            yield


@contextmanager
def metered(sides: Sequence[WorkerGroup]) -> Iterator[None]:
    """Print at the end whether the machine was quiet beside these sides."""
    meter = CpuMeter(ticks_of([pid for side in sides for pid in side.pids]))
    yield
    print(noise_line(meter.read(), len(os.sched_getaffinity(0))), flush=True)


def take_turns(
    turns: Mapping[str, tuple[WorkerGroup, str]], *, rounds: int, calls: int, warmup: int = 1
) -> dict[str, Timing]:
    """A timing for each turn, a way of a side. Who begins changes; a first round warms up."""
    timings, names = {name: Timing(name) for name in turns}, list(turns)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            side, way = turns[name]
            side.ask({"do": "way", "name": way})
            samples = side.time_block(calls, warmup)
            if number:
                timings[name].add(samples)
    return timings


def arguments(doc: str, *, rounds: int = 7) -> argparse.ArgumentParser:
    """A parser with the module's text, --rounds and --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each (default {rounds})")
    parser.add_argument("--json", metavar="FILE", help="also write a record")
    return parser


def write(file: str | None, record: object) -> None:
    """Write the record, if asked for."""
    if file:
        Path(file).write_text(json.dumps(record, indent=1) + "\n")


def start(main: Callable[[], int | None], rank: Callable[[dict[str, Any]], BenchWorker]) -> None:
    """The program; with --worker one of its ranks."""
    sys.exit(worker_main(sys.argv[2:], rank) if sys.argv[1:2] == ["--worker"] else main())
