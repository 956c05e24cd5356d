"""The results as a table for people, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence

from unisono.commands.simulate.trials import Trial
from unisono.networks import Network
from unisono.networks.quantities import written_time

__all__ = ["TrialProgress", "as_json", "table"]

COLUMNS = ("algorithm", "time", "busbw", "messages", "latency", "bytes", "overhead", "compute", "limit")

FASTEST = ("collective", "algorithm", "bytes", "seconds", "messages", "limit")

BETWEEN_LINES_S = 10.0  # where standard error is no terminal


class TrialProgress:
    """Says on standard error what has been simulated: each trial on a terminal, elsewhere one every 10 s."""

    def __init__(self) -> None:
        self._done = 0
        self._last = time.monotonic()

    def show(self, trial: Trial) -> None:
        """Count a trial that has ended, and print it if a line is due."""
        self._done += 1
        if not sys.stderr.isatty() and time.monotonic() - self._last < BETWEEN_LINES_S:
            return
        self._last = time.monotonic()
        wish = trial.wish
        text = trial.problem or written_time(trial.seconds)
        print(f"{self._done}: {_name(trial)} {wish.nbytes} B: {text}", file=sys.stderr)


def table(network: Network, trials: Sequence[Trial]) -> str:
    """A table for each size, the fastest algorithm first."""
    lines = []
    for nbytes in dict.fromkeys(trial.wish.nbytes for trial in trials):
        found = [trial for trial in trials if trial.wish.nbytes == nbytes]
        done = sorted((trial for trial in found if not trial.problem), key=lambda trial: trial.seconds)
        collective = found[0].wish.collective
        lines.append(f"{collective} of {nbytes} B on {network.name}, {network.size} ranks")
        rows = [COLUMNS, *(tuple(_row(network, trial)) for trial in done)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
        for row in rows:
            cells = (
                f"{cell:<{width}}" if at in (0, len(row) - 1) else f"{cell:>{width}}"
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  {_name(trial)}: {trial.problem}" for trial in found if trial.problem]
        lines.append("")
    return "\n".join(lines).rstrip()


def _name(trial: Trial) -> str:
    return f"{trial.wish.algorithm} {trial.wish.note}".strip()


def _row(network: Network, trial: Trial) -> Iterator[str]:
    """The parts of the time are shares of it: those of the longest chain of messages."""
    yield _name(trial)
    yield written_time(float(f"{trial.seconds:.4g}"))
    yield f"{bus_bandwidth(trial, network.size) / 1e9:.3g} GB/s"
    yield str(trial.messages)
    for part in (trial.latency_s, trial.transfer_s, trial.overhead_s, trial.compute_s):
        yield f"{100 * part / trial.seconds:.0f} %" if trial.seconds else "-"
    yield trial.limit


def bus_bandwidth(trial: Trial, size: int) -> float:
    """Bytes per second as nccl-tests count them; docs/bench.md."""
    factors = {
        "all_reduce": 2 * (size - 1) / size,
        **dict.fromkeys(
            ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"), (size - 1) / size
        ),
    }
    return (
        factors.get(trial.wish.collective, 1.0) * trial.wish.nbytes / trial.seconds if trial.seconds else 0.0
    )


def as_json(network: Network, trials: Sequence[Trial]) -> str:
    """All results, the fastest first within a size, and the fastest of the last size once more at the top."""
    order = {nbytes: at for at, nbytes in enumerate(dict.fromkeys(trial.wish.nbytes for trial in trials))}
    found = sorted(trials, key=lambda trial: (order[trial.wish.nbytes], bool(trial.problem), trial.seconds))
    results = [dict(_record(network, trial)) for trial in found]
    done = [each for each in results if "seconds" in each and each["bytes"] == found[-1].wish.nbytes]
    fastest = {key: done[0][key] for key in FASTEST} if done else {}
    return json.dumps(
        {"network": network.name, "ranks": network.size, **fastest, "results": results}, indent=1
    )


def _record(network: Network, trial: Trial) -> Iterator[tuple[str, object]]:
    wish = trial.wish
    yield "collective", wish.collective
    yield "algorithm", wish.algorithm
    if wish.note:
        yield "note", wish.note
    yield "bytes", wish.nbytes
    yield "segment_bytes", wish.segment
    if trial.problem:
        yield "problem", trial.problem
        return
    yield "seconds", trial.seconds
    yield "messages", trial.messages
    yield "limit", trial.limit
    yield "limit_seconds", trial.limit_s
    yield "latency_seconds", trial.latency_s
    yield "transfer_seconds", trial.transfer_s
    yield "overhead_seconds", trial.overhead_s
    yield "compute_seconds", trial.compute_s
    yield "slowest_rank", trial.slowest
    yield "busbw_bytes_per_s", bus_bandwidth(trial, network.size)
