"""`unisono demo`: several processes train a small language model over Unisono, then over Gloo.

    corpus   the standard library's source text       model           a byte-level GPT
    train    one rank's program, plain PyTorch        communication   what a step spends on it
    jobs     starts the ranks, reads their reports    screen          progress and comparison

This module is the command; it does not import torch, the ranks do.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from unisono.bench.noise import CpuMeter, ticks_of_ended_children
from unisono.demo.jobs import TrainingJob
from unisono.demo.screen import Progress, TrainingRecord, comparison, printable

__all__ = ["add_arguments", "main"]

INSTALL_TORCH = "pip install torch==2.13.0"
EXIT_INTERRUPTED = 130
SAMPLE_BYTES = 600
BACKENDS = {"unisono": "Unisono", "gloo": "Gloo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=4, help="processes (default 4)")
    add("--steps", type=int, default=300, help="training steps (default 300)")
    add("--seconds", type=float, default=50.0, help="fewer steps when they would take longer (default 50)")
    add("--batch", type=int, default=4, help="sequences per rank and step (default 4)")
    add("--seed", type=int, default=0, help="of weights, data order and sample (default 0)")
    add("--backends", default="unisono,gloo", help="comma list, one run each (default unisono,gloo)")


def main(args: argparse.Namespace) -> int:
    """Run the demo. Exit code: 0, 1 a run failed or ranks disagree, 2 usage, 130 interrupted."""
    backends = [name.strip() for name in args.backends.split(",")]
    complaint = complain(args, backends)
    if complaint:
        print(f"unisono demo: {complaint}", file=sys.stderr)
        return 2
    progress = Progress(sys.stdout)
    try:
        return show(args, backends, progress)
    except KeyboardInterrupt:
        progress.clear()
        print("unisono demo: interrupted, all ranks ended", file=sys.stderr)
        return EXIT_INTERRUPTED


def complain(args: argparse.Namespace, backends: list[str]) -> str | None:
    """Say what is wrong with the arguments or the installation, in one line."""
    if find_spec("torch") is None:
        return f"this needs PyTorch: {INSTALL_TORCH}"
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        return f"unknown backend {unknown[0]!r}: choose from {', '.join(BACKENDS)}"
    for name in ("ranks", "steps", "seconds", "batch"):
        if getattr(args, name) <= 0:
            return f"--{name} {getattr(args, name)}: must be positive"
    return None


def show(args: argparse.Namespace, backends: list[str], progress: Progress) -> int:
    """Train once per backend on the same steps, then compare."""
    runs: list[TrainingRecord] = []
    for backend in backends:
        run = train_over(args, backend, runs[0] if runs else None, progress)
        if run is None:
            return 1
        runs.append(run)
        if run.sample:
            progress.line(f"\nwhat it writes after {len(run.losses)} steps, given 'def ':\n")
            progress.line(printable(run.sample) + "\n")
    progress.line(comparison(runs))
    return report_digests(runs, progress)


def train_over(
    args: argparse.Namespace, backend: str, before: TrainingRecord | None, progress: Progress
) -> TrainingRecord | None:
    """One run; None when it failed, which the launcher has explained by then."""
    record = TrainingRecord(BACKENDS[backend])
    steps = args.steps if before is None else before.total
    arguments = {
        "backend": backend,
        "steps": steps,
        "seconds": args.seconds,
        "batch": args.batch,
        "seed": args.seed,
    }
    words = [f"--{name}={value}" for name, value in arguments.items()]
    words += [f"--sample-bytes={SAMPLE_BYTES}"] if before is None else ["--fixed-schedule"]
    progress.line(f"{record.name}: starting {args.ranks} ranks ...")
    meter = CpuMeter(ticks_of_ended_children)
    with TrainingJob(args.ranks, words, progress.line) as job:
        for report in job.records():
            record.take(report)
            if report["unisono_demo"] == "start":
                progress.line(
                    f"{record.name}: {record.parameters / 1e6:.1f} million parameters,"
                    f" {record.tokens_per_step} bytes of source text per step"
                )
            elif report["unisono_demo"] == "step":
                progress.show(record)
        if job.exit_code != 0 or not record.losses:
            progress.line(f"unisono demo: the run over {record.name} failed (exit code {job.exit_code})")
            return None
    progress.clear()
    noise = meter.read()
    record.others_cpu = None if noise is None else noise.others
    return record


def report_digests(runs: list[TrainingRecord], progress: Progress) -> int:
    """Show each rank's parameter hash under Unisono; 1 when they differ."""
    run = runs[0]
    verdict = "bit-identical" if run.identical else "DIFFERENT"
    shown = " ".join(digest[:12] for digest in (run.digests[:1] if run.identical else run.digests))
    progress.line(
        f"parameters after training over {run.name}: {verdict} on {len(run.digests)} ranks, sha256 {shown}"
    )
    return 0 if run.identical else 1
