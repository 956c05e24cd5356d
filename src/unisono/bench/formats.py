"""A run's record (see report.to_json) as CSV, as the OSU benchmarks print it, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["FORMATS", "plot", "plot_missing", "to_csv", "to_osu"]

Record = dict[str, Any]
STYLES = {"memcpy": "--", "limit": "--k", "predicted": ":"}
"""Of the curves that are no library's."""


def to_csv(record: Record) -> str:
    """One row per operation, size and library; times in microseconds, ratio is Unisono's over theirs."""
    text = io.StringIO()
    names = (
        "operation",
        "nbytes",
        "count",
        "dtype",
        "ranks",
        "library",
        "p50_us",
        "p99_us",
        "ratio",
        "wrong",
    )
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for line in record["lines"]:
        case = [line[name] for name in names[:5]]
        for library, figures in _libraries(line).items():
            writer.writerow([*case, library, *(figures.get(name, "") for name in names[6:])])
    return text.getvalue().rstrip("\n")


def to_osu(record: Record) -> str:
    """Size and latency of Unisono alone, in the columns that scripts for the OSU benchmarks read."""
    texts: list[str] = []
    operation = None
    for line in record["lines"]:
        if line["operation"] != operation:
            operation = line["operation"]
            texts += [
                f"# Unisono {operation}, {line['ranks']} ranks",
                f"{'# Size':<10}{'Avg Latency(us)':>18}",
            ]
        texts.append(f"{line['nbytes']:<10}{line['block_us']:>18.2f}")
    return "\n".join(texts)


FORMATS: dict[str, Callable[[Record], str]] = {"csv": to_csv, "osu": to_osu}


def plot_missing() -> str | None:
    """A line that says how to get matplotlib, None when it is there."""
    return (
        None
        if find_spec("matplotlib")
        else "--plot needs the package matplotlib: pip install 'unisono[plot]'"
    )


def plot(record: Record, target: str) -> None:
    """Write time over size, log-log: a panel per operation, a line per library.

    The machine's limits are dashed, the prediction is dotted.
    """
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    lines = [line for line in record["lines"] if line["nbytes"]]
    operations = list(dict.fromkeys(line["operation"] for line in lines)) or ["nothing with a size"]
    figure, panels = pyplot.subplots(1, len(operations), figsize=(5 * len(operations), 4), squeeze=False)
    for panel, operation in zip(panels[0], operations, strict=True):
        _draw(panel, operation, [line for line in lines if line["operation"] == operation])
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def _draw(panel: Any, operation: str, lines: list[Record]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for library, figures in _libraries(line).items():
            if "p50_us" in figures:
                curves.setdefault(library, []).append((line["nbytes"], figures["p50_us"]))
        if line.get("predicted_us"):
            curves.setdefault("predicted", []).append((line["nbytes"], line["predicted_us"]))
    for library, points in curves.items():
        panel.plot(*zip(*points, strict=True), STYLES.get(library, "-o"), label=library)
    panel.set(title=operation, xlabel="bytes", ylabel="microseconds", xscale="log", yscale="log")
    if curves:
        panel.legend()


def _libraries(line: Record) -> dict[str, Record]:
    return {"unisono": line, **line["peers"]}
