"""The demo's NumPy part: ranks train together; then one is killed, and the others report it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from unisono.demo.jobs import TrainingJob
from unisono.demo.screen import Progress, TrainingRecord, printable

__all__ = ["show"]

KILLED = 137  # the launcher's exit code for a rank that was ended by SIGKILL


def show(args: argparse.Namespace, progress: Progress) -> int:
    """Train, show a sample, lose a rank. Return the exit code."""
    record = TrainingRecord("NumPy")
    options = [f"--seconds={args.numpy_seconds}", f"--seed={args.seed}"]
    progress.line(
        f"{args.ranks} ranks train a language model in NumPy; every step is one all_reduce of the gradient"
    )
    endings: list[Mapping[str, Any]] = []
    with TrainingJob(args.ranks, "unisono.demo.numpy_train", options, progress.line) as job:
        for report in job.records():
            if report["unisono_demo"] in ("killed", "lost"):
                endings.append(report)
                progress.line(ending(report, endings[0]))
                continue
            record.take(report)
            if report["unisono_demo"] == "start":
                size = f"{record.parameters:,} parameters, {record.tokens_per_step:,} bytes of Python source"
                progress.line(f"{size} per step")
            elif report["unisono_demo"] == "step":
                progress.show(record)
            else:
                tell_result(record, progress)
        code = job.exit_code
    complaint = complain(record, endings, args.ranks, code)
    if complaint:
        progress.line(f"unisono demo: the NumPy part failed: {complaint}")
    return int(bool(complaint))


def tell_result(record: TrainingRecord, progress: Progress) -> None:
    """The loss, whether the ranks agree, a sample of what the model writes, and what comes next."""
    verdict = "the same bits" if record.identical else "DIFFERENT"
    progress.line(
        f"loss {record.losses[0]:.2f} -> {record.loss_after(len(record.losses)):.2f} nats per byte"
        f" in {len(record.losses)} steps; parameters on {len(record.digests)} ranks: {verdict}"
    )
    progress.line("what the model writes, given 'def ':\n")
    progress.line(printable(record.sample) + "\n")
    if len(record.digests) > 1:
        progress.line(
            f"now rank {len(record.digests) - 1} is killed while the others wait for it in all_reduce"
        )


def ending(report: Mapping[str, Any], kill: Mapping[str, Any]) -> str:
    """One line on the kill, or on a survivor's error and its delay."""
    if report["unisono_demo"] == "killed":
        return f"rank {report['rank']}: kill -9 {report['pid']}"
    return (
        f"rank {report['by']}, {(report['at'] - kill['at']) * 1e3:.0f} ms later: PeerLost: {report['text']}"
    )


def complain(record: TrainingRecord, endings: list[Mapping[str, Any]], ranks: int, code: int | None) -> str:
    """Return the fault of the run; "" when there is none."""
    if not record.losses:
        return f"exit code {code}"
    if not record.identical:
        return "the ranks ended with different parameters"
    named = [end["by"] for end in endings if end["unisono_demo"] == "lost" and end["rank"] == ranks - 1]
    if sorted(named) != list(range(ranks - 1)):
        return f"rank {ranks - 1} was killed, and only ranks {sorted(named)} named it"
    expected = KILLED if ranks > 1 else 0
    return "" if code == expected else f"exit code {code}, expected {expected}"
