"""The file under a `FileStore`: a table, guarded by two locks.

    magic line | u64 number of changes, u64 offset, u64 bytes | ... | table: MessagePack, at that offset | ...

Both locks are open-file-description locks (`fcntl`), on bytes far beyond the data. The kernel (on NFS the
server) releases them when their holder ends in any way:

    LOG       exclusive while writing, shared while reading
    PRESENCE  shared by every process that has the store open, for as long as it is open

A change writes the new table beside the old one, and then the 24 bytes that say where it is. A writer that is
killed before leaves the old table.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.store.operations import KeyValueTable
from unisono.errors import StoreError, StoreTimeout, message

MAGIC = b"UNISONO FILE STORE 2\n"
HEADER = struct.Struct(">QQQ")
FIRST_TABLE = len(MAGIC) + HEADER.size
LOG_BYTE = 1 << 62
PRESENCE_BYTE = LOG_BYTE + 1
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Content(msgspec.Struct, array_like=True):
    """What the file holds: how many processes have opened the store in this run, and its keys."""

    joined: int
    values: dict[str, bytes]


_decode = msgspec.msgpack.Decoder(Content).decode


def is_store(path: str) -> bool:
    """Whether there is a file that begins as a store's does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class StoreLog:
    """An open file, and its table.

    Args:
        path: opened, created when absent; never followed when it is a symbolic link.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.table = KeyValueTable()
        self.joined = 0
        self._seen = b""  # the header that belongs to the table here
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            what = limit_text(error) if is_limit(error) else error.strerror
            raise StoreError(f"cannot open the store's file {path!r}: {what}") from error
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            self.close()
            raise StoreError(message(f"the store's file {path!r} is no regular file"))

    def close(self) -> None:
        """Close the descriptor; that gives up its locks, too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # Locks.

    @contextmanager
    def locked(self, deadline: float, *, writing: bool) -> Iterator[None]:
        """Hold the LOG lock.

        Raises:
            StoreTimeout: another process kept it until `deadline`.
        """
        pause_s = 0.0002
        while not self._lock(LOG_BYTE, fcntl.F_WRLCK if writing else fcntl.F_RDLCK):
            if time.monotonic() >= deadline:
                raise StoreTimeout(
                    message(
                        "another process keeps the file locked",
                        where=f"FileStore {self.path}",
                        remedy="See whether a process that uses it is stopped.",
                    )
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        try:
            yield
        finally:
            self._lock(LOG_BYTE, fcntl.F_UNLCK)

    def claim_alone(self) -> bool:
        """Try to get PRESENCE exclusively: True when no other process has the store open."""
        return self._lock(PRESENCE_BYTE, fcntl.F_WRLCK)

    def claim_shared(self) -> None:
        """Hold PRESENCE, shared with others."""
        self._lock(PRESENCE_BYTE, fcntl.F_RDLCK)

    def claim_nothing(self) -> None:
        """Release PRESENCE."""
        self._lock(PRESENCE_BYTE, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
            return True
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            hint = "Its file system has no locks; use tcp://." if error.errno in _NO_LOCKS else ""
            raise StoreError(
                message(f"cannot lock the store's file {self.path!r}: {error.strerror}", remedy=hint)
            ) from error

    # Content. The caller holds the LOG lock.

    def is_at_path(self) -> bool:
        """Whether the path still leads to the open file (it may have been deleted or replaced meanwhile)."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def begin(self) -> None:
        """Start an empty table, dropping what an earlier run left in the file.

        Raises:
            StoreError: the file is no store's; it is not changed.
        """
        start = os.pread(self.fd, len(MAGIC), 0)
        if not MAGIC.startswith(start):
            raise StoreError(
                message(
                    f"{self.path!r} exists and is no Unisono store file",
                    observed=f"it begins with {start!r}",
                    remedy="Give the store a path of its own.",
                )
            )
        os.ftruncate(self.fd, 0)
        self._write(MAGIC, 0)
        self.table, self.joined = KeyValueTable(), 0
        self.record()

    def unchanged(self) -> bool:
        """Whether nothing was written since the last refresh; without the lock this is only a hint."""
        return self._seen == self._header()

    def refresh(self) -> None:
        """Take what others have written."""
        status = os.fstat(self.fd)
        if status.st_nlink == 0:
            raise StoreError(message("the file was deleted while in use", where=f"FileStore {self.path}"))
        header = self._header()
        if header == self._seen:
            return
        try:
            _, start, nbytes = HEADER.unpack(header)
            with open(self.fd, "rb", closefd=False) as file:
                file.seek(min(start, status.st_size))
                found = _decode(file.read(min(nbytes, status.st_size)))
        except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(
                message("the store's file is damaged", where=f"FileStore {self.path}")
            ) from error
        self.table, self.joined, self._seen = KeyValueTable({**found.values}), found.joined, header

    def forget(self) -> None:
        """Read the file at the next `refresh`: after an interrupt the table may not agree with it."""
        self._seen = b""

    def record(self) -> None:
        """Write the table; needs a `refresh` before, under the same lock. After an exception: `forget`."""
        data = msgspec.msgpack.encode(Content(self.joined, self.table.values))  # type: ignore[arg-type]
        changes, start, nbytes = HEADER.unpack(self._seen or bytes(HEADER.size))
        beside = FIRST_TABLE if FIRST_TABLE + len(data) <= start else max(FIRST_TABLE, start + nbytes)
        self._write(data, beside)
        header = HEADER.pack(changes + 1, beside, len(data))
        self._write(header, len(MAGIC))
        self._seen = header

    def _header(self) -> bytes:
        return os.pread(self.fd, HEADER.size, len(MAGIC))

    def _write(self, data: bytes, at: int) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self.fd, left, at)
                left, at = left[written:], at + written
        except OSError as error:
            what = limit_text(error) if is_limit(error) else error.strerror
            raise StoreError(f"cannot write to the store's file {self.path!r}: {what}") from error
