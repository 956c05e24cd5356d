"""The barrier before a measured block: the same for every library.

A library's own barrier would change the result. If it releases the root first, the next broadcast is nearly
finished before the other ranks read their clocks. If it releases ranks in any order, they wait for the root
within the broadcast. (Hunold and Carpen-Amarie, "Reproducible MPI Benchmarking is Still Not As Easy As You
Think", IEEE TPDS 2016, measure the effect and also use their own barrier.)
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from unisono import _native

__all__ = ["StartBarrier", "barrier_memory"]


@contextmanager
def barrier_memory(size: int) -> Iterator[str]:
    """Shared memory in which `size` processes of this machine line up: the path by which they open it."""
    fd = os.memfd_create("unisono-line-up")
    try:
        os.ftruncate(fd, size * _native.START_BARRIER_SLOT)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


class StartBarrier:
    """Call it to wait until all `size` ranks have called it as often."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, size * _native.START_BARRIER_SLOT)
        finally:
            os.close(fd)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._rank, self._size = rank, size
        self._crowded = size > len(os.sched_getaffinity(0))

    def __call__(self) -> None:
        _native.line_up(self._address, self._size, self._rank, self._crowded)
