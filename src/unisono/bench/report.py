"""The table, with nccl-tests' columns, and the JSON record of a run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unisono.bench.cases import OPERATIONS
from unisono.bench.contenders import ASIDE, LIMITS
from unisono.bench.measure import Line, Timing, Unmeasurable
from unisono.bench.noise import QUIET_SHARE, Noise, Pace

__all__ = ["header", "machine", "noise_line", "reasons", "row", "to_json"]

COLUMNS = (
    *("size", "count", "type", "redop", "root", "p50", "p99", "algbw", "busbw", "#wrong"),
    *("algorithm", "predicted"),
)
UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "", "(us)")
WIDTHS = (12, 12, 6, 9, 6, 11, 11, 9, 9, 8, 14, 11)
PEER_WIDTHS = (14, 9)


def header(operation: str, peers: Sequence[str]) -> str:
    """Three lines: the operation, the names of the columns, their units."""
    names = _cells(COLUMNS, WIDTHS) + "".join(_cells((f"{peer} p50", "ratio"), PEER_WIDTHS) for peer in peers)
    units = _cells(UNITS, WIDTHS) + "".join(_cells(("(us)", ""), PEER_WIDTHS) for _ in peers)
    if _compared(peers):
        names, units = f"{names} {'to best':>8}", f"{units} {'':>8}"
    return f"# {operation}\n#{names[1:]}\n#{units[1:]}".rstrip()


def row(line: Line) -> str:
    """One line of the table."""
    case, own = line.case, line.own
    operation = OPERATIONS[case.operation]
    bandwidths = (f"{line.algbw_gbps:.3f}", f"{line.busbw_gbps:.3f}") if case.count else ("-", "-")
    cells = (
        str(case.nbytes),
        str(case.count),
        case.dtype if case.count else "-",
        case.op if operation.reduces else "none",
        str(case.root) if operation.rooted else "-1",
        _us(own.p50_us),
        _us(own.p99_us),
        *bandwidths,
        str(own.wrong),
        line.algorithm or "-",
        "-" if line.predicted_us is None else _us(line.predicted_us),
    )
    peers = (_cells(_peer_cells(line, peer), PEER_WIDTHS) for peer in line.peers)
    best = line.best_ratio()
    shown = _compared([peer.side for peer in line.peers])
    last = f" {'-' if best is None else f'{best:.3g}':>8}" if shown else ""
    return _cells(cells, WIDTHS) + "".join(peers) + last


def _compared(peers: Sequence[str]) -> bool:
    """Whether several libraries are among the sides, so that there is a best one."""
    return sum(peer not in ASIDE for peer in peers) > 1


def noise_line(noise: Noise | None, cores: int) -> str:
    """Whether the machine was quiet, in words."""
    if noise is None:
        return "# not known whether the machine was quiet: there is no /proc here"
    used = f"other processes used {noise.others - noise.stolen:.0%} of {cores} cores during the run"
    used += f", the host took {noise.stolen:.1%}"
    if noise.others <= QUIET_SHARE:
        return f"# quiet machine: {used}"
    return f"# THE MACHINE WAS NOT QUIET: {used}; times and ratios vary more than they should"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "kernel": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in ("unisono", "numpy", "torch") if (found := _version(name))},
    }


def to_json(
    lines: Sequence[Line], settings: dict[str, Any], noise: Noise | None, cores: int, pace: Pace
) -> dict[str, Any]:
    """The whole run as one JSON object; `ratio` is Unisono's time over the peer's."""
    others, stolen = (None, None) if noise is None else noise
    quiet = None if others is None else others <= QUIET_SHARE
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["unisono", *sys.argv[1:]],
        "settings": settings,
        "machine": machine() | {"cores": cores},
        "noise": {
            "others_cpu_share": others,
            "stolen_cpu_share": stolen,
            "quiet": quiet,
            "pace": pace.to_json(),
        },
        "lines": [line.to_json() for line in lines],
    }


def reasons(lines: Sequence[Line]) -> list[str]:
    """Why a peer has no figure, each reason once; and peers whose values were wrong."""
    notes: dict[str, None] = {}
    for line in lines:
        for peer in line.peers:
            if peer.side in LIMITS:
                continue
            if isinstance(peer, Unmeasurable):
                notes[f"# {line.case.operation}: {peer.reason.splitlines()[0]}"] = None
            elif peer.wrong:
                notes[f"# {line.case.operation}: {peer.side} left wrong values, see docs/bench.md"] = None
    return list(notes)


def _peer_cells(line: Line, peer: Timing | Unmeasurable) -> tuple[str, str]:
    if isinstance(peer, Unmeasurable):
        return "-", "-"
    return _us(peer.p50_us), f"{line.ratio(peer):.3g}"


def _us(value: float) -> str:
    """Two decimals while they mean something.

    Example: 1.234 -> "1.23", 8123.4 -> "8123".
    """
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _cells(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Right-aligned; a text too wide for its column pushes the rest, it does not run into it."""
    return "".join(f" {text:>{width - 1}}" for text, width in zip(texts, widths, strict=True))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())
