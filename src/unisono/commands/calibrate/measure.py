"""Measures the machine, in threads of this process; see `csrc/calibrate/measure.cpp`.

Every figure is the best of a few tries at different times: a disturbance only makes a try slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import numpy as np

from unisono import _native
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration, MemoryBandwidth, identity
from unisono.engine.group import connect
from unisono.engine.store import HashStore

__all__ = ["cache_sizes", "measure"]

TRIES = 2
RATE_S = 0.012
ROUND_TRIPS = 1000
PAIRS = 6
CALLS = 2000
CROWD_ROUNDS = 20
HANDED_BYTES, HANDED_ROUNDS = 128 << 10, 100
LEAST_BYTES, MOST_BYTES = 16 << 20, 64 << 20
"""The most bytes of a core's buffer in memory, which is several times the shared cache."""


def measure() -> MachineCalibration:
    """This machine in numbers; takes one to two seconds."""
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cache_sizes()
    sizes = buffer_sizes(own, shared, len(cores))
    latency, stream = _native.probe_loopback(0.08)
    give, take = _handing(cores)
    return MachineCalibration(
        machine=identity(),
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cores=len(cores),
        cache_bytes=own,
        shared_cache_bytes=shared,
        flag_s=_flag(cores),
        wake_s=min(_native.probe_wake(core, ROUND_TRIPS // 10) for core in cores[:2]),
        crowd_s=_native.probe_crowd(cores, CROWD_ROUNDS),
        give=give,
        take=take,
        call_s=_call(),
        copy=_rates(False, sizes, cores),
        reduce=_rates(True, sizes, cores),
        tcp_s=latency,
        tcp=stream,
    )


def cache_sizes() -> tuple[int, int]:
    """Bytes of a core's own second-level cache, and of the third level; the defaults if unknown."""
    found = {2: DEFAULTS.cache_bytes, 3: DEFAULTS.shared_cache_bytes}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, size = ((index / name).read_text().strip() for name in ("level", "size"))
            if level in ("2", "3"):
                found[int(level)] = int(size.rstrip("K")) << 10
        except (OSError, ValueError):
            continue
    return found[2], found[3]


def buffer_sizes(own: int, shared: int, cores: int) -> tuple[int, int, int]:
    """Bytes of each of a core's two buffers: for its own cache, its part of the shared cache, and memory.

    Example: 1 MiB of its own, 36 MiB shared by 2 cores -> 256 KiB, 2.25 MiB, 64 MiB.
    """
    part = max(own, shared // (8 * cores)) // 4096 * 4096
    memory = min(MOST_BYTES, max(LEAST_BYTES, 4 * shared // cores))
    return own // 4, part, memory


def _flag(cores: Sequence[int]) -> float:
    """Half a round trip, the median over pairs: the cores of the ranks are not known."""
    others = list(islice(cores[1:], 0, None, max(1, len(cores) // PAIRS)))
    if not others:
        return _native.probe_wake(cores[0], ROUND_TRIPS // 10)
    return float(np.median([_native.probe_flag(cores[0], other, ROUND_TRIPS) for other in others]))


def _handing(cores: Sequence[int]) -> tuple[float, float]:
    """Of one core alone what its own cache gives."""
    if len(cores) == 1:
        rate = _best(False, HANDED_BYTES, list(cores))
        return rate, rate
    found = [_native.probe_hand(HANDED_BYTES, cores[0], cores[-1], HANDED_ROUNDS) for _ in range(TRIES)]
    return max(give for give, _ in found), max(take for _, take in found)


def _rates(reduces: bool, sizes: tuple[int, int, int], cores: list[int]) -> MemoryBandwidth:
    return MemoryBandwidth(*(_best(reduces, size, used) for used in (cores[:1], cores) for size in sizes))


def _best(reduces: bool, nbytes: int, cores: list[int]) -> float:
    return max(_native.probe_rate(reduces, nbytes, cores, RATE_S) for _ in range(TRIES))


def _call() -> float:
    """Seconds of an all_reduce of four bytes in a group of one: what Python and the engine take."""
    x = np.zeros(1, np.float32)
    with connect(HashStore(10.0), 0, 1, name="calibration", timeout_s=10.0) as group:
        return min(_timed(lambda: group.all_reduce(x), CALLS) for _ in range(TRIES + 1))


def _timed(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
