"""The status board: who runs, who ended and how, in memory that every rank can read.

A memfd of 16-byte records, one per local rank, each four aligned 32-bit integers:

    pid | state (0 not started, 1 running, 2 exited, 3 ended by a signal) | code | reserved

Only the launcher writes. `state` is stored last, so whoever sees 2 or 3 sees the right code.
"""

from __future__ import annotations

import fcntl
import mmap
import os

__all__ = ["EXITED", "NOT_STARTED", "RUNNING", "SIGNALED", "StatusBoard"]

NOT_STARTED, RUNNING, EXITED, SIGNALED = range(4)

_FIELDS = 4
_RECORD_NBYTES = 4 * _FIELDS
# Values of <linux/fcntl.h>; the fcntl module does not name them on every Python.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4


class StatusBoard:
    """The launcher's side of the board. `fd` is a read-only descriptor made for the ranks."""

    def __init__(self, size: int) -> None:
        owned = os.memfd_create("unisono-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(owned, size * _RECORD_NBYTES)
            fcntl.fcntl(owned, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._map = mmap.mmap(owned, size * _RECORD_NBYTES)
            self.fd = os.open(f"/proc/self/fd/{owned}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(owned)
        self._fields = memoryview(self._map).cast("i")

    def started(self, rank: int, pid: int) -> None:
        """Note that `rank` runs as process `pid`."""
        self._fields[rank * _FIELDS] = pid
        self._fields[rank * _FIELDS + 1] = RUNNING

    def ended(self, rank: int, *, code: int, signaled: bool) -> None:
        """Note the exit code of `rank`, or the number of the signal that ended it."""
        self._fields[rank * _FIELDS + 2] = code
        self._fields[rank * _FIELDS + 1] = SIGNALED if signaled else EXITED

    def close(self) -> None:
        """Give the memory back; the ranks' own mappings live on."""
        self._fields.release()
        self._map.close()
        os.close(self.fd)
