"""The demo's PyTorch part: the same DistributedDataParallel training over Unisono, then over Gloo."""

from __future__ import annotations

import argparse

from unisono.bench.noise import CpuMeter, ticks_of_ended_children
from unisono.demo.jobs import TrainingJob
from unisono.demo.screen import Progress, TrainingRecord, comparison, printable

__all__ = ["BACKENDS", "compare"]

BACKENDS = {"unisono": "Unisono", "gloo": "Gloo"}
SAMPLE_BYTES = 600


def compare(args: argparse.Namespace, backends: list[str], progress: Progress) -> int:
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
    """One run; None when it failed: the launcher has printed the reason."""
    record = TrainingRecord(BACKENDS[backend])
    steps = args.steps if before is None else before.total
    arguments = {
        "backend": backend,
        "steps": steps,
        "seconds": args.seconds,
        "batch": args.batch,
        "seed": args.seed,
    }
    options = [f"--{name}={value}" for name, value in arguments.items()]
    options += [f"--sample-bytes={SAMPLE_BYTES}"] if before is None else ["--fixed-schedule"]
    progress.line(f"{record.name}: starting {args.ranks} ranks ...")
    meter = CpuMeter(ticks_of_ended_children)
    with TrainingJob(args.ranks, "unisono.demo.train", options, progress.line) as job:
        for report in job.records():
            record.take(report)
            if report["unisono_demo"] == "start":
                progress.line(
                    f"{record.name}: {record.parameters / 1e6:.1f} million parameters,"
                    f" {record.tokens_per_step} bytes of source text per step"
                )
            elif report["unisono_demo"] == "step":
                tell_fewer_steps(record, args.seconds, progress)
                progress.show(record)
        if job.exit_code != 0 or not record.losses:
            progress.line(f"unisono demo: the run over {record.name} failed (exit code {job.exit_code})")
            return None
    progress.clear()
    noise = meter.read()
    record.others_cpu = None if noise is None else noise.others
    return record


def tell_fewer_steps(record: TrainingRecord, seconds: float, progress: Progress) -> None:
    """Explain why the number of steps changes: the first steps show how long one takes."""
    planned, now = ([step["steps"] for step in record.steps[-2:]] * 2)[:2]
    if now != planned:
        progress.line(f"{record.name}: {now} of the {planned} steps fit into {seconds:g} s")


def report_digests(runs: list[TrainingRecord], progress: Progress) -> int:
    """Show each rank's parameter hash under Unisono; 1 when they differ."""
    run = runs[0]
    verdict = "bit-identical" if run.identical else "DIFFERENT"
    shown = " ".join(digest[:12] for digest in (run.digests[:1] if run.identical else run.digests))
    progress.line(
        f"parameters after training over {run.name}: {verdict} on {len(run.digests)} ranks, sha256 {shown}"
    )
    return 0 if run.identical else 1
