"""The demo's benchmark: all_reduce between two ranks against memcpy, by `unisono bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from unisono.demo.screen import Progress

__all__ = ["show"]

BENCH = ["bench", "all_reduce", "-n", "2", "--against", "memcpy", "--no-limit"]
SIZES = ("4", "256", "16K", "1M", "64M")
QUICK = ["--rounds", "3", "--format", "json"]
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def show(progress: Progress) -> int:
    """Measure, and show a line for each size when it is done. Return the exit code."""
    progress.line("\nall_reduce of f32 between 2 ranks, against one memcpy of the same size per rank")
    progress.line(f"    unisono {' '.join(BENCH)} -b {SIZES[0]} -e {SIZES[-1]} -f 64")
    progress.line(f"{'':>8}{'all_reduce':>14}{'memcpy':>14}{'wrong values':>14}")
    for size in SIZES:
        command = [sys.executable, "-m", "unisono", *BENCH, "-b", size, "-e", size, *QUICK]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            progress.line(done.stderr)
            return done.returncode
        [line] = json.loads(done.stdout)["lines"]
        progress.line(row(line))
        if line["wrong"]:
            return 1
    return 0


def row(line: dict[str, Any]) -> str:
    """One size: median times, and how many values were wrong."""
    times = (line["p50_us"], line["peers"]["memcpy"]["p50_us"])
    return (
        f"{size_text(line['nbytes']):>8}"
        + "".join(f"{us_text(us):>14}" for us in times)
        + f"{line['wrong']:>14}"
    )


def size_text(nbytes: int) -> str:
    """Example: 16384 -> "16 KiB"."""
    unit, name = next((unit, name) for unit, name in UNITS if nbytes >= unit)
    return f"{nbytes / unit:g} {name}"


def us_text(us: float) -> str:
    """Example: 0.64 -> "0.6 us", 13982 -> "14 ms"."""
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms"
