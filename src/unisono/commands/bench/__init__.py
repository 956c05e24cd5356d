"""`unisono bench`: measures the collectives on this machine, and other libraries in the same run.

    cases     the operations, their bus-bandwidth factors, and what every rank must hold afterwards
    contenders, torch_contender   the libraries, behind one interface
    worker, side    one rank; one set of ranks, which is idle while another one works
    peers, mpi_worker   the libraries to compare with; ranks under an MPI library's own mpiexec
    measure   rounds, medians, ratios       noise     was the machine quiet
    report    table, JSON, CSV, OSU, plot

This module is the command: arguments in, table out. How a round is measured: docs/bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from unisono.commands.bench.cases import OPERATIONS, REDUCE_OPS, BenchCase, dtype_name, numpy_dtype, sweep
from unisono.commands.bench.libraries import choose_libraries, choose_worker_group
from unisono.commands.bench.measure import CaseResult, measure_sweep
from unisono.commands.bench.noise import CoreSpeed, CpuMeter, ticks_of
from unisono.commands.bench.report import (
    FORMATS,
    header,
    noise_line,
    plot,
    plot_missing,
    reasons,
    row,
    to_json,
)
from unisono.commands.bench.worker_group import WorkerGroup
from unisono.engine.environment.env import parse_size
from unisono.errors import UnisonoError
from unisono.plans import ALGORITHMS

__all__ = ["add_arguments", "main"]

TORCH_LACKS = ("scan", "exclusive_scan")
SETTINGS = (
    *("operation", "ranks", "min_bytes", "max_bytes", "factor", "dtype", "op", "root", "algorithm"),
    *("interface", "against", "limit", "rounds", "round_ms"),
)
"""The bench's own arguments, for the record."""
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; the short ones are nccl-tests'."""
    add = parser.add_argument
    add("operation", type=_operation, choices=[*OPERATIONS, "all"], help="what to measure")
    add("-n", "--ranks", type=int, default=2, help="processes per side (default 2)")
    add("-b", "--min-bytes", default="4", metavar="SIZE", help="smallest size: 4, 64K, 1M ... (default 4)")
    add("-e", "--max-bytes", default="64M", metavar="SIZE", help="largest size (default 64M)")
    add("-f", "--factor", type=float, default=2.0, help="from size to size (default 2)")
    add("--dtype", default="f32", help="u8 i8 i16 i32 i64 f16 bf16 f32 f64 (default f32)")
    add("--op", default="sum", help="sum avg product min max band bor bxor (default sum)")
    add("--root", type=int, default=0, help="root of rooted operations (default 0)")
    add("--algorithm", default="", help="of Unisono, instead of the one it chooses (NumPy interface)")
    add("--interface", choices=["numpy", "torch"], default="numpy", help="how Unisono is called")
    add("--against", default="", metavar="PEERS", help="comma list of gloo, mpich, openmpi, intelmpi, memcpy")
    add("--no-limit", dest="limit", action="store_false", help="leave out the machine's own limit")
    add("--rounds", type=int, default=7, help="turns per side and size (default 7)")
    add("--round-ms", type=float, default=50.0, help="length of a side's turn (default 50)")
    add("--format", choices=["table", "json", "csv", "osu"], default="table", help="of standard output")
    add("--plot", metavar="FILE", help="also draw time over size (needs unisono[plot])")
    add("--json", metavar="FILE", help="also write a JSON record; '-' is standard output")


def _operation(text: str) -> str:
    """An operation's name; "sendrecv" is a usual spelling of send_recv."""
    return "send_recv" if text == "sendrecv" else text


def main(args: argparse.Namespace) -> int:
    """Measure and report. Exit code: 0, 1 wrong values or a failure, 2 usage, 130 interrupted."""
    if args.format == "json":
        args.json = args.json or "-"
    report = sys.stderr if args.json == "-" or args.format != "table" else sys.stdout
    try:
        return _run(args, report)
    except KeyboardInterrupt:
        print("\nunisono bench: interrupted, all workers ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ValueError as error:
        print(f"unisono bench: {error}", file=sys.stderr)
        return 2
    except UnisonoError as error:
        print(f"unisono bench: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, report: TextIO) -> int:
    sweeps = _sweeps(args)
    if args.plot and (missing := plot_missing()) is not None:
        raise ValueError(missing)
    own_name = choose_worker_group(args.interface)
    peers = choose_libraries(f"{'limit' if args.limit else ''},{args.against}")
    cores = len(os.sched_getaffinity(0))
    lines: list[CaseResult] = []
    pace = CoreSpeed()
    print(_preamble(args, [f"{peer.name} = {peer.what}" for peer in peers]), file=report, flush=True)
    with ExitStack() as stack:
        own = stack.enter_context(WorkerGroup(own_name, args.ranks))
        others = [stack.enter_context(peer.side(args.ranks)) for peer in peers]
        meter = CpuMeter(ticks_of([pid for side in [own, *others] for pid in side.pids]))
        for name, of_operation in sweeps:
            print(header(name, [peer.name for peer in peers]), file=report, flush=True)
            measured = measure_sweep(
                [*of_operation], own, others, rounds=args.rounds, round_ms=args.round_ms, pace=pace
            )
            lines += measured
            print("\n".join(row(line) for line in measured), file=report, flush=True)
        noise = meter.read()
    for text in [*reasons(lines), noise_line(noise, cores), f"# {pace}"]:
        print(text, file=report, flush=True)
    settings = {name: getattr(args, name) for name in SETTINGS}
    _write(args, to_json(lines, settings, noise, cores, pace))
    return 1 if any(line.own.wrong for line in lines) else 0


def _sweeps(args: argparse.Namespace) -> list[tuple[str, Iterator[BenchCase]]]:
    """The operations asked for, each with its cases; all arguments are checked here."""
    known = ALGORITHMS.get(args.operation.removesuffix("_v"), ())
    first, last = _nbytes("-b", args.min_bytes), _nbytes("-e", args.max_bytes)
    kind = numpy_dtype(args.dtype).kind
    checks = (
        (args.ranks >= 1, f"-n {args.ranks}: at least one rank"),
        (first <= last, f"-b {args.min_bytes} is more than -e {args.max_bytes}"),
        (args.factor > 1.0, f"-f {args.factor}: the factor must be more than 1"),
        (args.rounds >= 1, f"--rounds {args.rounds}: at least one round"),
        (args.round_ms > 0, f"--round-ms {args.round_ms}: must be positive"),
        (0 <= args.root < args.ranks, f"--root {args.root}: ranks are 0 to {args.ranks - 1}"),
        (args.op in REDUCE_OPS, f"unknown --op {args.op}: choose from {', '.join(REDUCE_OPS)}"),
        (
            args.op != "avg" or kind not in "iu",
            f"--op avg has no meaning for {args.dtype}: use a float dtype",
        ),
        (args.op not in ("band", "bor", "bxor") or kind in "iu", f"--op {args.op} needs an integer dtype"),
        (not args.algorithm or args.interface == "numpy", "--algorithm needs --interface numpy"),
        (
            not args.algorithm or args.algorithm in known,
            f"--algorithm {args.algorithm}: {args.operation} has {', '.join(known) or 'none'}",
        ),
        (args.operation != "send_recv" or args.ranks >= 2, "send_recv needs -n 2 or more"),
        (
            args.interface != "torch" or args.operation not in TORCH_LACKS,
            f"torch.distributed has no {args.operation}: use --interface numpy",
        ),
    )
    for holds, complaint in checks:
        if not holds:
            raise ValueError(complaint)
    names = list(OPERATIONS) if args.operation == "all" else [args.operation]
    if args.ranks < 2:
        names = [name for name in names if name != "send_recv"]
    if args.interface == "torch":
        names = [name for name in names if name not in TORCH_LACKS]
    span = {"first": first, "last": last, "factor": args.factor}
    rest = {"dtype": dtype_name(args.dtype), "op": args.op, "root": args.root, "ranks": args.ranks}
    rest["algorithm"] = args.algorithm
    return [(name, sweep(OPERATIONS[name], **span, **rest)) for name in names]


def _nbytes(flag: str, text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text}: expected {error}") from None
    if nbytes < 1:
        raise ValueError(f"{flag} {text}: at least one byte")
    return nbytes


def _preamble(args: argparse.Namespace, peers: list[str]) -> str:
    interface = "torch.distributed" if args.interface == "torch" else "the NumPy API"
    lines = [
        f"# unisono bench: {args.ranks} ranks through {interface}, {args.rounds} rounds",
        "# time of a call: slowest rank; p50: median over rounds of the round's median; 1 GB = 1e9 bytes",
    ]
    if peers:
        lines.append(
            "# ratio: Unisono's time over the peer's in the same round, median; below 1 Unisono is faster"
        )
    return "\n".join(lines + [f"# {peer}" for peer in peers])


def _write(args: argparse.Namespace, record: dict[str, object]) -> None:
    """Write the record in every requested format."""
    text = json.dumps(record, indent=1)
    if args.json == "-":
        print(text, flush=True)
    elif args.json:
        Path(args.json).write_text(text + "\n")
    if args.format in FORMATS:
        print(FORMATS[args.format](record), flush=True)
    if args.plot:
        plot(record, args.plot)
