"""What the launcher's processes and its ranks tell each other: the status board, the socket on which ranks
hand over errors, the line in which the supervisor tells its front.

The board says who runs, who ended and how, in memory that every rank can read.

A memfd of 16-byte records, one per local rank, each four aligned 32-bit integers:

    pid | state (0 not started, 1 running, 2 exited, 3 ended by a signal) | code | reserved

Only the launcher writes. `state` is stored last, so whoever sees 2 or 3 sees the right code.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator, Mapping

import msgspec

from unisono.diagnosis.report import Uncaught

__all__ = ["EXITED", "NOT_STARTED", "RUNNING", "SIGNALED", "Inbox", "StatusBoard", "shared_file", "tell"]

NOT_STARTED, RUNNING, EXITED, SIGNALED = range(4)

_LONGEST_RECORD_NBYTES = 1 << 18
_FIELDS = 4
_RECORD_NBYTES = 4 * _FIELDS
# Values of <linux/fcntl.h>; the fcntl module does not name them on every Python.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4

_SHARED_NBYTES = 1 << 20  # more than csrc/virtual/accounting.hpp maps


def shared_file() -> str:
    """Make memory that all processes of the job can open by name; it goes when this process does.

    Virtual GPUs note in it what each process uses of them.
    """
    fd = os.memfd_create("unisono-virtual-gpus", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SHARED_NBYTES)
    return f"/proc/{os.getpid()}/fd/{fd}"


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


class Inbox:
    """Where ranks hand over the errors that end them: one message each, whole or not at all.

    `fd` is what the ranks inherit; `name` tells them which descriptor it is, and by its inode that it is
    still the same one.
    """

    def __init__(self) -> None:
        self.socket, self._ranks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.fd = self._ranks.fileno()
        self.name = f"{self.fd}:{os.fstat(self.fd).st_ino}"

    def read(self) -> Iterator[Uncaught]:
        """What has come since. What is no such record is passed over: its rank shows by its exit code."""
        while True:
            try:
                data = self.socket.recv(_LONGEST_RECORD_NBYTES)
            except BlockingIOError:
                return
            try:
                yield msgspec.json.decode(data, type=Uncaught)
            except msgspec.DecodeError:
                continue


def tell(fd: int, record: Mapping[str, object]) -> None:
    """Write one line, the whole of it: a signal ends the write of a long one half way.

    Raises:
        OSError: nobody reads any more.
    """
    rest = memoryview(msgspec.json.encode(record) + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]
