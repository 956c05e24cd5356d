"""Was the machine quiet? Measures the processor time that other processes used, and that the host took.

Read from /proc: what all processors did, less what our own processes did. Times measured while
another process computes are still ratios of a same-run comparison, but they vary more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono import _native

QUIET_SHARE = 0.05
"""The share of a quiet machine that other processes and the host may use together."""

# Fields of the first line of /proc/stat, see proc(5). Without interrupt time, which is partly ours.
USER, NICE, SYSTEM, STEAL = 0, 1, 2, 7


@dataclass(frozen=True)
class CpuTicks:
    """Clock ticks since boot, over all processors: used in total, used by us, and stolen by the host."""

    elapsed: int
    used: int
    ours: int
    stolen: int = 0


class CpuNoise(NamedTuple):
    """Shares of all processors' time, 0 to 1: used by other processes, and of it stolen by the host."""

    others: float
    stolen: float


def others_share(before: CpuTicks, after: CpuTicks) -> float:
    """Share of all processors' time that other processes (and the hypervisor) took, 0 to 1.

    Example: 100 ticks passed on all processors, 60 were used, 55 of them by us -> 0.05.
    """
    elapsed = after.elapsed - before.elapsed
    others = (after.used - before.used) - (after.ours - before.ours)
    return min(1.0, max(0.0, others / elapsed)) if elapsed > 0 else 0.0


class CoreSpeed:
    """How fast the cores are at the moment, read between the blocks of a run: what /proc/stat does not tell.

    Two readings: the time of one fixed piece of work, which moves where the clock does, or where a neighbour
    of the same physical core comes and goes; and the time in which a store of one core reaches another. Where
    the host moves a virtual machine's processors between caches, the second changes by a factor of five.
    """

    ROUND_TRIPS = 500

    def __init__(self) -> None:
        self.times_us: list[float] = []
        self.line_ns: list[float] = []
        cores = sorted(os.sched_getaffinity(0))
        self._cores = (cores[0], cores[1]) if len(cores) > 1 else None

    def beat(self) -> None:
        """Take both readings once; about half a millisecond."""
        start = time.perf_counter_ns()
        sum(range(20_000))
        self.times_us.append((time.perf_counter_ns() - start) / 1e3)
        if self._cores:
            self.line_ns.append(_native.probe_flag(*self._cores, self.ROUND_TRIPS) * 1e9)

    def to_json(self) -> dict[str, float]:
        """The median of each reading, and the range in which four out of five lie; without readings empty."""
        found = {}
        for unit, readings in (("us", self.times_us), ("line_ns", self.line_ns)):
            times = sorted(readings)
            for name, share in (("low", 0.1), ("median", 0.5), ("high", 0.9)) if times else ():
                found[f"{name}_{unit}"] = times[int(share * (len(times) - 1))]
        return found

    def __str__(self) -> str:
        found = self.to_json()
        if not found:
            return "no pace was taken"
        low, middle, high = (found[name] for name in ("low_us", "median_us", "high_us"))
        text = f"a fixed piece of work took {middle:.0f} us on a core, mostly {low:.0f} to {high:.0f}"
        if not self.line_ns:
            return text
        low, middle, high = (found[name] for name in ("low_line_ns", "median_line_ns", "high_line_ns"))
        return f"{text}; a store reached another core in {middle:.0f} ns, mostly {low:.0f} to {high:.0f}"


class CpuMeter:
    """Measures from its making to each `read()`; None where there is no /proc.

    Args:
        ours: returns the clock ticks that our own processes have used so far.
    """

    def __init__(self, ours: Callable[[], int]) -> None:
        self.ours = ours
        self.start = self._reading()

    def read(self) -> CpuNoise | None:
        """What others used since the start."""
        now = self._reading()
        if self.start is None or now is None:
            return None
        elapsed = max(1, now.elapsed - self.start.elapsed)
        return CpuNoise(others_share(self.start, now), (now.stolen - self.start.stolen) / elapsed)

    def _reading(self) -> CpuTicks | None:
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            ours = self.ours()
        except (OSError, ValueError, IndexError):
            return None
        used = ticks[USER] + ticks[NICE] + ticks[SYSTEM] + ticks[STEAL]
        return CpuTicks(sum(ticks), used, ours, ticks[STEAL])


def ticks_of(pids: Sequence[int]) -> Callable[[], int]:
    """For a CpuMeter: this process and the living ones with these numbers."""
    return lambda: sum(_process_ticks(pid) for pid in (os.getpid(), *pids))


def _process_ticks(pid: int) -> int:
    """User and system ticks of one process: the 14th and 15th field of /proc/PID/stat."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])
