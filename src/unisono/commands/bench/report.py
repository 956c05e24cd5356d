"""A run as a table with nccl-tests' columns, as a JSON record, as CSV, in OSU's columns, as curves."""

from __future__ import annotations

import csv
import io
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.commands.bench.cases import OPERATIONS
from unisono.commands.bench.contenders import ASIDE, LIMITS
from unisono.commands.bench.measure import CaseResult, MeasurementFailure, Timing
from unisono.commands.bench.noise import QUIET_SHARE, CoreSpeed, CpuNoise

Record = dict[str, Any]

COLUMNS = (
    *(("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 6), ("redop", "", 9), ("root", "", 6)),
    *(("p50", "(us)", 11), ("p99", "(us)", 11), ("algbw", "(GB/s)", 9), ("busbw", "(GB/s)", 9)),
    *(("#wrong", "", 8), ("algorithm", "", 14), ("predicted", "(us)", 11)),
)
"""Name, unit and width."""
PEER_WIDTHS = (14, 9)
CSV_CASE = ("operation", "nbytes", "count", "dtype", "ranks")
CSV_FIGURES = ("p50_us", "p99_us", "ratio", "wrong")
CSV_BANDWIDTHS = ("algbw_gbps", "busbw_gbps")
STYLES = {"memcpy": "--", "limit": "--k", "predicted": ":"}
"""Of the curves that are no library's."""


# ---- the table -----------------------------------------------------------------------------------------


def header(operation: str, peers: Sequence[str]) -> str:
    """Three lines: the operation, the names of the columns, their units."""
    widths = [width for _, _, width in COLUMNS] + [width for _ in peers for width in PEER_WIDTHS]
    names = [name for name, _, _ in COLUMNS] + [text for peer in peers for text in (f"{peer} p50", "ratio")]
    units = [unit for _, unit, _ in COLUMNS] + ["(us)", ""] * len(peers)
    best = f" {'to best':>8}" if _compared(peers) else ""
    text = f"# {operation}\n#{_cells(names, widths)[1:]}{best}\n#{_cells(units, widths)[1:]}"
    return (text + " " * len(best)).rstrip()


def row(line: CaseResult) -> str:
    """One line of the table."""
    case, own, operation = line.case, line.own, OPERATIONS[line.case.operation]
    cells = [
        str(case.nbytes),
        str(case.count),
        case.dtype if case.count else "-",
        case.op if operation.reduces else "none",
        str(case.root) if operation.rooted else "-1",
        _us(own.p50_us),
        _us(own.p99_us),
        *((f"{line.algbw_gbps:.3f}", f"{line.busbw_gbps:.3f}") if case.count else ("-", "-")),
        str(own.wrong),
        line.algorithm or "-",
        "-" if line.predicted_us is None else _us(line.predicted_us),
    ]
    text = _cells(cells, [width for _, _, width in COLUMNS])
    for peer in line.peers:
        found = (_us(peer.p50_us), f"{line.ratio(peer):.3g}") if isinstance(peer, Timing) else ("-", "-")
        text += _cells(found, PEER_WIDTHS)
    best = line.best_ratio()
    shown = _compared([peer.side for peer in line.peers])
    return text + (f" {'-' if best is None else f'{best:.3g}':>8}" if shown else "")


def _compared(peers: Sequence[str]) -> bool:
    """Whether several libraries are among the sides, so that there is a best one."""
    return sum(peer not in ASIDE for peer in peers) > 1


def _us(value: float) -> str:
    """Two decimals while they mean something.

    Example: 1.234 -> "1.23", 8123.4 -> "8123".
    """
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _cells(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Right-aligned; a text too wide for its column pushes the rest, it does not run into it."""
    return "".join(f" {text:>{width - 1}}" for text, width in zip(texts, widths, strict=True))


def noise_line(noise: CpuNoise | None, cores: int) -> str:
    """Whether the machine was quiet, in words."""
    if noise is None:
        return "# not known whether the machine was quiet: there is no /proc here"
    used = f"other processes used {noise.others - noise.stolen:.0%} of {cores} cores during the run"
    used += f", the host took {noise.stolen:.1%}"
    if noise.others <= QUIET_SHARE:
        return f"# quiet machine: {used}"
    return f"# THE MACHINE WAS NOT QUIET: {used}; times and ratios vary more than they should"


def reasons(lines: Sequence[CaseResult]) -> list[str]:
    """Why a peer has no figure, each reason once; and peers whose values were wrong."""
    notes: dict[str, None] = {}
    for line in lines:
        for peer in line.peers:
            if peer.side in LIMITS:
                continue
            if isinstance(peer, MeasurementFailure):
                notes[f"# {line.case.operation}: {peer.reason.splitlines()[0]}"] = None
            elif peer.wrong:
                notes[f"# {line.case.operation}: {peer.side} left wrong values, see docs/bench.md"] = None
    return list(notes)


# ---- the record, and its other forms -------------------------------------------------------------------


def machine() -> Record:
    """What the figures were measured on."""
    cpu, packages = platform.processor(), {}
    with suppress(OSError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    for name in ("unisono", "numpy", "torch"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    python = platform.python_version()
    return {"cpu": cpu, "kernel": platform.platform(), "python": python, "packages": packages}


def to_json(
    lines: Sequence[CaseResult], settings: Record, noise: CpuNoise | None, cores: int, pace: CoreSpeed
) -> Record:
    """The whole run as one JSON object; `ratio` is Unisono's time over the peer's."""
    others, stolen = (None, None) if noise is None else noise
    quiet = None if others is None else others <= QUIET_SHARE
    shares = {"others_cpu_share": others, "stolen_cpu_share": stolen, "quiet": quiet}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["unisono", *sys.argv[1:]],
        "settings": settings,
        "machine": machine() | {"cores": cores},
        "noise": {**shares, "pace": pace.to_json()},
        "lines": [line.to_json() for line in lines],
    }


def to_csv(record: Record) -> str:
    """One row per operation, size and library; times in microseconds, ratio is Unisono's over theirs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*CSV_CASE, "library", *CSV_FIGURES, *CSV_BANDWIDTHS])
    for line in record["lines"]:
        for library, figures in _libraries(line).items():
            case = [line[name] for name in CSV_CASE]
            found = (figures.get(name, "") for name in CSV_FIGURES)
            writer.writerow([*case, library, *found, *_bandwidths(line, figures.get("p50_us"))])
    return text.getvalue().rstrip("\n")


def _bandwidths(line: Record, time_us: float | None) -> tuple[str, str]:
    """Algorithm and bus bandwidth in GB/s of a call that takes so long; "" where there are none."""
    if not time_us or not line["count"]:
        return "", ""
    algbw = line["nbytes"] / time_us / 1e3
    return f"{algbw:.4f}", f"{algbw * OPERATIONS[line['operation']].bus_factor(line['ranks']):.4f}"


def to_osu(record: Record) -> str:
    """Unisono alone, in the columns that scripts for the OSU benchmarks read, and its two bandwidths."""
    texts: list[str] = []
    operation = None
    for line in record["lines"]:
        if line["operation"] != operation:
            operation = line["operation"]
            texts.append(f"# Unisono {operation}, {line['ranks']} ranks")
            texts.append(f"{'# Size':<10}{'Avg Latency(us)':>18}{'AlgBW(GB/s)':>14}{'BusBW(GB/s)':>14}")
        bandwidths = "".join(f"{each:>14}" for each in _bandwidths(line, line["block_us"]))
        texts.append(f"{line['nbytes']:<10}{line['block_us']:>18.2f}{bandwidths}".rstrip())
    return "\n".join(texts)


FORMATS: dict[str, Callable[[Record], str]] = {"csv": to_csv, "osu": to_osu}


def plot_missing() -> str | None:
    """A line that says how to get matplotlib, None when it is there."""
    there = find_spec("matplotlib") is not None
    return None if there else "--plot needs the package matplotlib: pip install 'unisono[plot]'"


def plot(record: Record, target: str) -> None:
    """Write time over size, log-log: a panel per operation, a line per library.

    The machine's limits are dashed, the prediction is dotted.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in (line for line in record["lines"] if line["nbytes"]):
        curves = panels.setdefault(line["operation"], {})
        times = {name: one["p50_us"] for name, one in _libraries(line).items() if "p50_us" in one}
        times |= {"predicted": line["predicted_us"]} if line.get("predicted_us") else {}
        for name, us in times.items():
            curves.setdefault(name, []).append((line["nbytes"], us))
    panels = panels or {"nothing with a size": {}}
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, places = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for panel, (title, curves) in zip(places[0], panels.items(), strict=True):
        for name, points in curves.items():
            panel.plot(*zip(*points, strict=True), STYLES.get(name, "-o"), label=name)
        panel.set(title=title, xlabel="bytes", ylabel="microseconds", xscale="log", yscale="log")
        if curves:
            panel.legend()
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def _libraries(line: Record) -> dict[str, Record]:
    return {"unisono": line, **line["peers"]}
