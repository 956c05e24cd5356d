"""The simulator beside this machine: every collective and algorithm, 2 to 8 ranks, one host and several.

    python benchmarks/grid.py measure grid.json     nine minutes, on an otherwise idle machine, as root
    python benchmarks/grid.py fit grid.json         fits a network to every other cell of each placement
    python benchmarks/grid.py check grid.json       errors on the cells that were not fitted

Hosts are network namespaces of this machine, with links of 1 Gbit/s. A cell is a collective, an algorithm and
a size. Its figure is the median over passes of the median of the slowest rank's times. `fit` writes the
networks into the file: a star for each placement, with the costs of `networks.Costs`. `check` prints every
cell that is off by more than 25 %. It counts the sizes where the algorithm that is predicted to be the best
is within 5 % of the one that was measured to be. Some algorithms have equal plans in a placement; how their
measured times differ is what the measurement itself repeats. `fitting.py` has the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from fitting import PLACEMENTS, SIZES, Cell, fitted, network_of, predict
from turns import HostWorkerGroup, hosts, network

from unisono.commands.bench.cases import OPERATIONS, BenchCase, sweep
from unisono.commands.bench.measure import calls_for
from unisono.commands.bench.noise import CoreSpeed, CpuMeter, ticks_of
from unisono.commands.bench.report import noise_line
from unisono.commands.bench.worker_group import BenchError, WorkerGroup
from unisono.plans import ALGORITHMS
from unisono.plans.catalog import steps_of

RATE = "1gbit"
BURST_BYTES = 1 << 20
"""Of calls before the clock runs: so the bursts of all links are used up."""

BLOCK_MS = 40.0
MOST_CALL_US = 1.2e6
"""A cell that takes longer is measured once only."""


# ---- measuring -----------------------------------------------------------------------------------------


def cases(ranks: int) -> Iterator[BenchCase]:
    """All cells of a placement, the smallest first."""
    for size in SIZES:
        for collective, names in ALGORITHMS.items():
            if collective == "barrier" and size != SIZES[0]:
                continue
            for algorithm in names:
                rest: dict[str, Any] = {"op": "sum", "root": 0, "ranks": ranks, "algorithm": algorithm}
                yield from sweep(
                    OPERATIONS[collective], first=size, last=size, factor=2.0, dtype="f32", **rest
                )


def measure_cell(
    side: WorkerGroup, case: BenchCase, shaped: bool, known_us: float | None
) -> tuple[float, float]:
    """Microseconds of a call, of the slowest rank: the median, and the tenth percentile."""
    side.ask({"do": "bind", "case": case.to_json()})
    if known_us is None:
        known_us = float(side.time_block(1, 1).max())
        if known_us > MOST_CALL_US:
            return known_us, known_us
    warmup = 2
    if shaped and case.nbytes:
        warmup = int(min(40, max(1, BURST_BYTES // case.nbytes)))
    calls = min(400, max(3, calls_for(known_us, BLOCK_MS)))
    slowest = side.time_block(calls, warmup).max(axis=0)
    return float(np.median(slowest)), float(np.percentile(slowest, 10))


def measure_placement(name: str, seconds: float) -> list[dict[str, Any]]:
    """Passes over all cells while the time lasts; a cell that would take too long for it is left out."""
    count, each = PLACEMENTS[name]
    found: dict[BenchCase, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        side: WorkerGroup
        if count == 1:
            side = WorkerGroup("unisono", each)
        else:
            net, token = stack.enter_context(network(count, RATE))
            side = HostWorkerGroup("unisono", net, each, token)
        stack.enter_context(side)
        meter = CpuMeter(ticks_of(side.pids))
        deadline = time.monotonic() + seconds
        passes = 0
        while time.monotonic() < deadline:
            for case in cases(count * each):
                if passes and case not in found:
                    continue
                before = found.get(case)
                if time.monotonic() + (before[0][0] * 4e-6 if before else 0) > deadline:
                    break
                try:
                    us = measure_cell(side, case, count > 1, before[0][0] if before else None)
                except BenchError as error:
                    print(f"  left out: {case.operation}/{case.algorithm} {case.nbytes} B: {error}")
                    continue
                found.setdefault(case, []).append(us)
            passes += 1
        print(
            f"{name}: {len(found)} cells, {passes} passes; {noise_line(meter.read(), os.cpu_count() or 1)}",
            flush=True,
        )
    return [
        {"placement": name, "collective": case.operation, "algorithm": case.algorithm,
         "nbytes": case.nbytes, "us": [median for median, _ in us], "low_us": [low for _, low in us]}
        for case, us in found.items()
    ]  # fmt: skip


def measure(args: argparse.Namespace) -> int:
    """Measure all placements; write the record."""
    if problem := hosts.why_not():
        print(f"left out: {problem}", file=sys.stderr)
        return 1
    names = args.placement or list(PLACEMENTS)
    cells: list[dict[str, Any]] = []
    for name in names:
        cells += measure_placement(name, args.minutes * 60 / len(names))
    record = {"rate": RATE, "measured": time.strftime("%Y-%m-%d"), "pace": str(CoreSpeed()), "cells": cells}
    Path(args.file).write_text(json.dumps(record) + "\n")
    return 0


# ---- fit and check ---------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> tuple[dict[str, Any], list[Cell]]:
    """The record and its cells."""
    record: dict[str, Any] = json.loads(Path(args.file).read_text())
    figure = (lambda cell: min(cell["low_us"])) if args.low else (lambda cell: np.median(cell["us"]))
    names = ("placement", "collective", "algorithm", "nbytes")
    return record, [Cell(*(cell[name] for name in names), us=float(figure(cell))) for cell in record["cells"]]


def half(cells: Sequence[Cell], parity: int) -> list[Cell]:
    """Every other cell of each size, so that both halves have all collectives, algorithms and sizes."""
    order = sorted(cells, key=lambda cell: (cell.nbytes, cell.collective, cell.algorithm))
    return [cell for at, cell in enumerate(order) if (at + SIZES.index(_size(cell.nbytes))) % 2 == parity]


def _size(nbytes: int) -> int:
    return min(SIZES, key=lambda size: abs(size - nbytes))


def fit(args: argparse.Namespace) -> int:
    """Fit each placement on half of its cells; write the parameters into the file."""
    record, cells = load(args)
    record.setdefault("fitted", {})
    for placement in args.placement or PLACEMENTS:
        mine = half([cell for cell in cells if cell.placement == placement], 0)
        if mine:
            record["fitted"][placement] = fitted(placement, mine)
            Path(args.file).write_text(json.dumps(record) + "\n")
    return 0


def check(args: argparse.Namespace) -> int:
    """Print the errors on the other half; the exit code is 1 if a bound does not hold."""
    record, cells = load(args)
    errors: list[float] = []
    repeated: list[float] = []
    good = sets = same = pooled = 0
    for placement, values in record.get("fitted", {}).items():
        net = network_of(placement, values)
        mine = [cell for cell in cells if cell.placement == placement]
        predicted = {cell: predict(net, cell) for cell in mine}
        judged = half(mine, 1)
        off = np.array([predicted[cell] / cell.us - 1 for cell in judged])
        errors += list(off)
        misses = [cell for cell in judged if abs(predicted[cell] / cell.us - 1) > 0.25]
        won, best_of = winners(mine, predicted)
        good, sets = good + won, sets + best_of
        plans, spread = equal_plans(placement, mine)
        same += winners(mine, plans)[0]
        pooled += winners(mine, predicted, plans)[0]
        repeated += spread
        print(
            f"{placement:>4}: {len(judged)} cells, error median {np.median(np.abs(off)):.0%}, "
            f"95th percentile {np.percentile(np.abs(off), 95):.0%}, {len(misses)} off by more than 25 %; "
            f"best algorithm {won} of {best_of}; equal plans differ by {np.median(spread):.0%}, "
            f"95th percentile {np.percentile(spread, 95):.0%}"
        )
        for cell in judged if args.all else misses:
            print(
                f"      {cell.name:52} measured {cell.us:12.1f} us, predicted {predicted[cell]:12.1f} us "
                f"({predicted[cell] / cell.us - 1:+.0%})"
            )
    if not errors:
        print("nothing is fitted yet: python benchmarks/grid.py fit FILE")
        return 1
    median, high = np.median(np.abs(errors)), np.percentile(np.abs(errors), 95)
    print(
        f"algorithms with equal plans: their measured times differ by {np.median(repeated):.1%}, "
        f"95th percentile {np.percentile(repeated, 95):.1%}; the plan with the best median of its algorithms "
        f"is within 5 % of the best in {same} of {sets}. With one time for each plan, their median, "
        f"the predicted best is within 5 % of the best in {pooled}"
    )
    held = median <= 0.10 and high <= 0.25 and good >= 0.95 * sets
    print(
        f"all: {len(errors)} cells that were not fitted: median {median:.1%} (10 %), "
        f"95th percentile {high:.1%} (25 %); "
        f"the predicted best is within 5 % of the best in {good} of {sets} (95 %): "
        f"{'HOLDS' if held else 'DOES NOT HOLD'}"
    )
    return 0 if held else 1


def winners(
    cells: Sequence[Cell], predicted: dict[Cell, float], measured: dict[Cell, float] | None = None
) -> tuple[int, int]:
    """(how often the predicted best algorithm is within 5 % of the measured best, out of how many)."""
    measured = measured or {cell: cell.us for cell in cells}
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.collective, cell.nbytes), []).append(cell)
    several = [group for group in groups.values() if len(group) > 1]
    won = sum(
        measured[min(group, key=lambda cell: predicted[cell])] <= 1.05 * min(measured[cell] for cell in group)
        for group in several
    )
    return won, len(several)


def equal_plans(placement: str, cells: Sequence[Cell]) -> tuple[dict[Cell, float], list[float]]:
    """What the measurement repeats: some algorithms have the same steps in a placement.

    Returns (the median of each cell's plan, by how much a cell is off the median of the others of its plan).
    """
    count, each = PLACEMENTS[placement]
    hosts_of = tuple(host for host in range(count) for _ in range(each))
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        steps = steps_of(cell.collective, cell.algorithm, len(hosts_of), hosts_of)
        plan = tuple(tuple(steps(rank, len(hosts_of), 0)) for rank in range(len(hosts_of)))
        groups.setdefault((cell.collective, cell.nbytes, plan), []).append(cell)
    middle = {cell: float(np.median([c.us for c in group])) for group in groups.values() for cell in group}
    off = [
        float(abs(np.median([other.us for other in group if other is not cell]) / cell.us - 1))
        for group in groups.values()
        for cell in group
        if len(group) > 1
    ]
    return middle, off


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["measure", "fit", "check"])
    parser.add_argument("file", nargs="?", default="grid.json")
    parser.add_argument("--minutes", type=float, default=9.0, help="for `measure` (9)")
    parser.add_argument("--placement", action="append", choices=list(PLACEMENTS), help="only these")
    parser.add_argument("--low", action="store_true", help="the tenth percentile, where the machine was busy")
    parser.add_argument("--all", action="store_true", help="`check` prints every cell")
    args = parser.parse_args(argv)
    return {"measure": measure, "fit": fit, "check": check}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
