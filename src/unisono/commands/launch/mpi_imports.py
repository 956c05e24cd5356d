"""Notices that a rank imports mpi4py: this launcher starts no MPI job, so each process would be alone in it.

MPI says nothing when a process that no MPI launcher has started begins: it is rank 0 of 1. The kernel says
that somebody opens the library of mpi4py (inotify). Whether it is a rank, the maps of its memory show.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator

IN_OPEN = 0x20
LOAD_S = 0.1
"""From the opening of a library until it is in the maps of the process; the loader takes less than 1 ms."""

LAUNCHED = (b"PMI_RANK=", b"PMI_FD=", b"PMIX_RANK=", b"OMPI_COMM_WORLD_RANK=", b"MPI_LOCALRANKID=")
"""Variables that launchers of MPI set for a process."""


class MpiImports:
    """Watches the library of the mpi4py of this Python.

    Attributes:
        fd: becomes readable when a process opens it; -1: there is no mpi4py, or it cannot be watched.
    """

    def __init__(self) -> None:
        self.fd = -1
        found = importlib.util.find_spec("mpi4py")
        if found is None or not found.submodule_search_locations:
            return
        import ctypes  # only where there is mpi4py

        libc = ctypes.CDLL(None)
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        folder = os.fsencode(found.submodule_search_locations[0])
        if self.fd >= 0 and libc.inotify_add_watch(self.fd, folder, IN_OPEN) < 0:
            self.close()

    def take(self, pids: Iterable[int]) -> int | None:
        """The first of these processes that has loaded mpi4py, or whose child has, outside of an MPI job."""
        with contextlib.suppress(BlockingIOError):
            while b"MPI." in os.read(self.fd, 1 << 16):
                until = time.monotonic() + LOAD_S
                while time.monotonic() < until:
                    for pid in pids:
                        if any(map(_alone, _family(pid))):
                            return pid
                    time.sleep(0.005)
        return None

    def close(self) -> None:
        """Watch no more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for child in map(int, _read(f"/proc/{pid}/task/{pid}/children").split()):
            yield from _family(child)


def _alone(pid: int) -> bool:
    """Whether a process has loaded mpi4py, and no launcher of MPI has started it."""
    try:
        loaded = b"/mpi4py/MPI." in _read(f"/proc/{pid}/maps")
        return loaded and not any(
            part.startswith(LAUNCHED) for part in _read(f"/proc/{pid}/environ").split(b"\0")
        )
    except OSError:  # it has ended
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
