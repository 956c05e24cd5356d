"""One simulation, in a process of its own: it can be ended when it takes too long."""

from __future__ import annotations

import json
import multiprocessing
import runpy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from unisono.networks import Network
from unisono.plans import StepFunction
from unisono.simulation import Result, simulate

__all__ = ["Trial", "Wish", "run", "timeline"]

MOST_SPANS = 200_000
DRAWN_RANKS = 256


class Wish(NamedTuple):
    """What to simulate.

    Attributes:
        algorithm: a name of the catalogue, file.py:function or a schedule file.  nbytes: of the whole buffer.
        segment: bytes; None: as the engine cuts.
        groups: the group of each rank, in place of its host, for algorithms that use hosts; (): the hosts.
        conditions: further arguments of `simulate`: slow, delay, slow_links, lost_links.
    """

    collective: str
    algorithm: str
    nbytes: int
    root: int
    segment: int | None
    groups: tuple[int, ...]
    conditions: dict[str, Any]
    note: str = ""


class Trial(NamedTuple):
    """What came of it. problem: why there is no result; "" if there is one."""

    wish: Wish
    seconds: float = 0.0
    messages: int = 0
    limit: str = ""
    limit_s: float = 0.0
    latency_s: float = 0.0
    transfer_s: float = 0.0
    overhead_s: float = 0.0
    compute_s: float = 0.0
    slowest: int = 0
    problem: str = ""


def run(network: Network, wish: Wish, patience_s: float) -> Trial:
    """Simulate. What goes wrong is the trial's problem."""
    context = multiprocessing.get_context("fork")  # the network is large, and nothing else runs
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, network, wish), daemon=True)
    process.start()
    sending.close()
    try:
        if not receiving.poll(patience_s):
            return Trial(wish, problem=f"not done in {patience_s:g} s (--patience)")
        found: Trial = receiving.recv()
    except EOFError:
        return Trial(wish, problem="the simulation was killed, perhaps for lack of memory")
    else:
        return found
    finally:
        process.kill()
        process.join()
        receiving.close()


def _child(connection: Connection, network: Network, wish: Wish) -> None:
    try:
        result = _simulate(network, wish)
        limit, parts = result.limit, result.breakdown
        trial = Trial(
            wish, result.seconds, result.messages, str(limit), limit.seconds,
            parts.latency_s, parts.transfer_s, parts.overhead_s, parts.compute_s, result.slowest,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  # shown to the user as it is
        trial = Trial(wish, problem=f"{type(error).__name__}: {error}")
    connection.send(trial)


def _simulate(network: Network, wish: Wish, spans: int = 0) -> Result:
    return simulate(
        wish.collective,
        network,
        algorithm=_algorithm(network, wish),
        nbytes=wish.nbytes,
        root=wish.root,
        segment_bytes=wish.segment,
        timeline=spans,
        fold=False if spans and network.size <= DRAWN_RANKS else None,  # folded ranks do not appear
        **wish.conditions,
    )


def _algorithm(network: Network, wish: Wish) -> str | StepFunction:
    name = wish.algorithm
    if ":" in name:
        file, _, function = name.rpartition(":")
        found = runpy.run_path(file).get(function)
        if not callable(found):
            raise ValueError(f"--algorithm {name}: {file} has no function {function}")
        own: StepFunction = found
        return own
    if wish.groups:
        from unisono.plans.catalog import steps_of

        return steps_of(wish.collective, name, network.size, wish.groups)
    return name


def timeline(network: Network, wish: Wish, file: Path) -> None:
    """Write what ranks did, for Perfetto, or as a picture.

    Raises:
        OSError: the file cannot be written.
    """
    from unisono.commands.simulate.timeline import perfetto, svg

    result = _simulate(network, wish, MOST_SPANS)
    file.write_text(json.dumps(perfetto(result)) if file.suffix == ".json" else svg(result), encoding="utf-8")
