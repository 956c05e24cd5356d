"""A file of POSIX as MPI's files need it: pieces, locks, a number that ranks share, classes of errors."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unisono.errors import UnisonoError
from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.layout import Pieces

WINDOW_NBYTES = 4 << 20
"""At most so much is read at once to pick small pieces out of it."""
SMALL_NBYTES = 4 << 10
"""Pieces that are smaller, on the average, are read by windows."""
EXCHANGED_NBYTES = 256
"""Pieces that are smaller, on the average, are written together by all ranks: 3 to 6 times faster."""

_CLASSES = {
    errno.ENOENT: constants.ERR_NO_SUCH_FILE,
    errno.EEXIST: constants.ERR_FILE_EXISTS,
    errno.EACCES: constants.ERR_ACCESS,
    errno.EPERM: constants.ERR_ACCESS,
    errno.EROFS: constants.ERR_READ_ONLY,
    errno.ENOSPC: constants.ERR_NO_SPACE,
    errno.EFBIG: constants.ERR_NO_SPACE,
    errno.EDQUOT: constants.ERR_QUOTA,
    errno.ETXTBSY: constants.ERR_FILE_IN_USE,
    errno.EISDIR: constants.ERR_BAD_FILE,
    errno.ENOTDIR: constants.ERR_BAD_FILE,
    errno.ENAMETOOLONG: constants.ERR_BAD_FILE,
    errno.ELOOP: constants.ERR_BAD_FILE,
    errno.EINVAL: constants.ERR_ARG,
}
_OFD_SETLKW = 38  # <linux/fcntl.h>; a lock of the open file, which threads that use one descriptor share
_FLOCK = struct.Struct("hhqqi4x")


@contextmanager
def classed(path: str) -> Iterator[None]:
    """An OSError of the file becomes MPI's exception; a lost rank, which is one too, stays what it is."""
    try:
        yield
    except UnisonoError:
        raise
    except OSError as error:
        code = _CLASSES.get(error.errno or 0, constants.ERR_IO)
        raise Exception(code, f"{path}: {error.strerror or error}") from error


@contextmanager
def locked(fd: int, start: int, end: int, shared: bool, wanted: bool = True) -> Iterator[None]:
    """Keep other ranks out of a range of a file; `wanted` False: do nothing."""
    if not wanted or start == end:
        yield
        return
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    fcntl.fcntl(fd, _OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, start, end - start, 0))
    try:
        yield
    finally:
        fcntl.fcntl(fd, _OFD_SETLKW, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, end - start, 0))


def read(fd: int, pieces: Pieces, out: Any) -> int:
    """Read pieces into `out`, one behind the other; how many bytes there are before the end of the file."""
    count, at = len(pieces.starts), 0
    if count > 1 and pieces.nbytes < count * SMALL_NBYTES:
        for part in _windows(pieces):
            nbytes = part.nbytes
            found = _read_window(fd, part, out[at : at + nbytes])
            at += found
            if found < nbytes:
                break
        return at
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        found = _read_run(fd, start, out[at : at + length])
        at += found
        if found < length:
            break
    return at


def _read_run(fd: int, start: int, out: Any) -> int:
    memory, at = memoryview(out), 0
    while at < len(memory):
        found = os.preadv(fd, [memory[at:]], start + at)
        if found == 0:
            break
        at += found
    return at


def _windows(pieces: Pieces) -> Iterator[Pieces]:
    """Successive pieces, as many as lie within a window."""
    begin, ends = 0, pieces.starts + pieces.lengths
    while begin < len(pieces.starts):
        reach = np.searchsorted(ends[begin:], pieces.starts[begin] + WINDOW_NBYTES, side="right")
        end = begin + max(1, int(reach))
        yield Pieces(pieces.starts[begin:end], pieces.lengths[begin:end])
        begin = end


def _read_window(fd: int, pieces: Pieces, out: Any) -> int:
    first, end = pieces.span()
    whole = np.empty(end - first, np.uint8)
    found = _read_run(fd, first, whole)
    nbytes = int(np.clip(first + found - pieces.starts, 0, pieces.lengths).sum())
    out[:nbytes] = whole[pieces.places(first)[:nbytes]]  # what lies behind the file's end stays as it is
    return nbytes


def write(fd: int, pieces: Pieces, data: Any) -> None:
    """Write `data` into pieces, one after the other."""
    memory, at = memoryview(data), 0
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        _write_run(fd, start, memory[at : at + length])
        at += length


def _write_run(fd: int, start: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], start + done)


def write_sorted(fd: int, pieces: Pieces, data: Any) -> None:
    """Write small pieces of several ranks, in any order: those that touch go to the file at once."""
    if not len(pieces.starts):
        return
    first, end = pieces.span()
    whole = np.empty(end - first, np.uint8)
    whole[pieces.places(first)] = data
    order = np.argsort(pieces.starts, kind="stable")
    starts, ends = pieces.starts[order], np.maximum.accumulate((pieces.starts + pieces.lengths)[order])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(starts) - 1]])
    for start, stop in zip(starts[begins].tolist(), ends[last].tolist(), strict=True):
        _write_run(fd, start, whole[start - first : stop - first].data)


class SharedNumber:
    """The file pointer that all ranks share, in a small file beside theirs that its last user removes."""

    def __init__(self, path: str) -> None:
        self.path, self._fd = path, -1
        self._turn = threading.Lock()  # the lock of the file is that of its descriptor: of all threads here

    def add(self, amount: int, replace: bool = False) -> int:
        """Add to it, or replace it; the value before. Any thread."""
        with self._turn:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with locked(self._fd, 0, 8, shared=False):
                before = int.from_bytes(os.pread(self._fd, 8, 0), "little")
                os.pwrite(self._fd, (amount + (0 if replace else before)).to_bytes(8, "little"), 0)
        return before

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
