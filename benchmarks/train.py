"""Step time of training a small transformer in several ways, over Unisono and over Gloo in the same run.

    python benchmarks/train.py --ranks 2 --model 10M
    python benchmarks/train.py --ranks 2 --model 10M --batch 1 --context 32        less computing per byte
    python benchmarks/train.py --ways ddp,fsdp2,up0,up1,up2,up3
    python benchmarks/train.py --ways ddp,up3 --memory     peak memory of a rank, a job for each way
    python benchmarks/train.py --ways ddp,fsdp2,tensor,sequence,pipeline --rows 1
    python benchmarks/train.py table       plans against DDP and FSDP2: see train_table.py

training_ways.py lists the ways. Every rank holds one model for each way, from the same parameters, and the
ways take turns over Unisono and over Gloo. A step is forward, backward and AdamW. Before that all ways train
a few steps, and their losses have to agree. `to best`: the time over that of the fastest other way. `MB
received`: by a rank in a step.

`communication` is the share of a step that is not there where every rank trains by itself. `hidden`, for DDP:
how much of the time that the same all-reduces take by themselves does not show up in the step, because
backward goes on meanwhile: (alone + all-reduces - step) / all-reduces.

Memory is the most that a rank has held (VmHWM) in a few steps, less what it held before it had a model.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import train_table
from training_ways import (
    ALONE,
    COMPARED_STEPS,
    OURS,
    REDUCTIONS,
    SHARED,
    THEIRS,
    TrainingRank,
    same,
    width_of,
)
from turns import WorkerGroup, arguments, ranks_run, start, started, take_turns, write

from unisono.commands.bench.measure import Timing, ratio

SIDES = ("unisono-torch", "gloo")


def bind(side: WorkerGroup, way: str, args: Any) -> int:
    """Make the model of a way on every rank; returns its number of parameters."""
    rows = args.rows or args.batch * args.ranks
    command = {"do": "bind", "way": way, "width": width_of(args.model), "rows": rows}
    return int(side.ask({**command, "context": args.context})[0]["parameters"])


def measure(
    sides: list[WorkerGroup], ways: list[str], args: Any
) -> tuple[dict[tuple[str, str], Timing], dict[str, float]]:
    """Bind all ways, compare their losses, time the rounds.

    Returns:
        A timing for each (side, way), and the bytes that a rank of the first side receives in a step.
    """
    losses = {}
    for side in sides:
        for way in ways:
            parameters = bind(side, way, args)
            command = {"do": "losses", "way": way, "steps": COMPARED_STEPS}
            losses[f"{way} over {side.name}"] = side.ask(command)[0]["losses"]
    difference = same(losses)
    rows = args.rows or args.batch * args.ranks
    about = f"{args.ranks} ranks, {rows} x {args.context} bytes in all"
    print(f"# {parameters / 1e6:.1f} million parameters, {about}, losses differ by {difference:.1e}")
    received = {
        way: max(answer["bytes"] for answer in sides[0].ask({"do": "received", "way": way})) for way in ways
    }
    turns = {(side.name, way): (side, way) for side in sides for way in ways}
    for way in (ALONE, REDUCTIONS):
        bind(sides[0], way, args)
        turns[sides[0].name, way] = (sides[0], way)
    return take_turns(turns, rounds=args.rounds, calls=args.steps), received


def show(
    timings: dict[tuple[str, str], Timing], received: dict[str, float], ways: list[str], names: list[str]
) -> dict[str, Any]:
    """Print a line for each way; the same as a record."""
    own, records = names[0], {}
    alone, reduced = (timings[own, way].p50_us for way in (ALONE, REDUCTIONS))
    for way in ways:
        step = timings[own, way]
        found = {f"{name.removesuffix('-torch')} ms": timings[name, way].p50_us / 1e3 for name in names}
        if "gloo" in names[1:]:
            found["ratio"] = ratio(step, timings["gloo", way])
        others = [timings[own, each] for each in ways if each in THEIRS and each != way]
        if others:
            found["to best"] = ratio(step, min(others, key=lambda timing: timing.p50_us))
        found["communication"] = 1 - alone / step.p50_us
        if way == "ddp":
            found["hidden"] = min(1.0, max(0.0, (alone + reduced - step.p50_us) / reduced))
        found["MB received"] = received[way] / 1e6
        records[way] = found
        print(f"{way:8} " + "   ".join(f"{what} {value:8.3f}" for what, value in found.items()))
    print(f"alone {alone / 1e3:.1f} ms   all-reduces {reduced / 1e3:.1f} ms")
    return {**records, ALONE: {"ms": alone / 1e3}, REDUCTIONS: {"ms": reduced / 1e3}}


def peaks(ways: list[str], args: Any) -> dict[str, Any]:
    """Print the peak memory of a rank for each way; every way has its own processes."""
    records = {}
    for way in ways:
        with WorkerGroup("unisono-torch", args.ranks, ranks_run(__file__)) as side:
            parameters = bind(side, way, args)
            side.ask({"do": "losses", "way": way, "steps": COMPARED_STEPS})
            peak = statistics.median(answer["peak"] for answer in side.ask({"do": "peak"}))
        records[way] = {"peak_bytes": peak, "bytes_a_parameter": peak / parameters}
        print(f"{way:6} {peak / 1e6:8.1f} MB   {peak / parameters:5.1f} bytes a parameter", flush=True)
    return records


def main(words: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--model", default="10M", help="parameters, about (default 10M)")
    add("--batch", type=int, default=2, help="sequences per rank and step (default 2)")
    add("--rows", type=int, help="sequences of all ranks and step, in place of --batch")
    add("--context", type=int, default=64, help="bytes in a sequence (default 64)")
    add("--steps", type=int, default=5, help="steps in a turn (default 5)")
    add("--sides", default=",".join(SIDES), help=f"comma list of {', '.join(SIDES)}")
    add("--memory", action="store_true", help="measure peak memory instead of times")
    add("--ways", default="ddp,fsdp2", help=f"comma list of {', '.join((*THEIRS, *OURS, *SHARED))}")
    args = parser.parse_args(words)
    ways, names = args.ways.split(","), args.sides.split(",")
    if args.memory:
        records = peaks(ways, args)
    else:
        sides = [WorkerGroup(name, args.ranks, ranks_run(__file__)) for name in names]
        with started(sides):
            records = show(*measure(sides, ways, args), ways, names)
    write(args.json, {"ranks": args.ranks, "model": args.model, "ways": records})


if __name__ == "__main__":
    table = sys.argv[1:2] == ["table"]
    start(train_table.main if table else main, TrainingRank)
