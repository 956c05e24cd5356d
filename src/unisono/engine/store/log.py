"""The file under a `FileStore`: an append-only log of changes, guarded by two locks.

    magic line | record | record | ...          record: u32 head bytes, u64 payload bytes, u32 CRC of the head
                                                        | head: MessagePack | payload: raw value

Both locks are open-file-description locks (`fcntl`), on bytes far beyond the data. The kernel (on NFS the
server) releases them when their holder ends in any way:

    LOG       exclusive while writing, shared while reading
    PRESENCE  shared by every process that has the store open, for as long as it is open

A writer that is killed during a write leaves an incomplete record. Readers ignore it; the next writer
truncates it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.store.operations import KeyValueTable
from unisono.errors import StoreError, StoreTimeout, message

__all__ = ["DeleteRecord", "JoinRecord", "PutRecord", "StoreLog"]

MAGIC = b"UNISONO FILE STORE 1\n"
PREFIX = struct.Struct(">IQI")
LOG_BYTE = 1 << 62
PRESENCE_BYTE = LOG_BYTE + 1
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class JoinRecord(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """A process opened the store."""

    host: str
    pid: int


class PutRecord(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """`key` now has the payload as its value."""

    key: str


class DeleteRecord(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """`key` is gone."""

    key: str


Record = JoinRecord | PutRecord | DeleteRecord
_decode = msgspec.msgpack.Decoder(Record).decode


class StoreLog:
    """An open log file, and the table that results from its records.

    Args:
        path: opened, created when absent; never followed when it is a symbolic link.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.table = KeyValueTable()
        self.joined = 0
        self._end = 0  # after the last complete record
        self._seen = (0, 0)  # size and mtime at the last refresh
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
        """Start an empty log, dropping what an earlier run left in the file.

        Raises:
            StoreError: the file is not a log; it is not changed.
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
        self.table = KeyValueTable()
        self.joined = 0
        self._end = 0
        self._write(MAGIC)

    def unchanged(self) -> bool:
        """Whether nothing was written since the last refresh; without the lock this is only a hint."""
        return self._seen == _size_and_mtime(self.fd)

    def refresh(self) -> None:
        """Apply the records written by others."""
        if os.fstat(self.fd).st_nlink == 0:
            raise StoreError(message("the file was deleted while in use", where=f"FileStore {self.path}"))
        seen = _size_and_mtime(self.fd)
        if self._end == 0:
            self._end = len(MAGIC)
        data = memoryview(self._read(self._end, seen[0]))
        at = 0
        try:
            while (length := self._replay(data[at:])) > 0:
                at += length
            self._end += at
        except BaseException:
            self.forget()
            raise
        self._seen = seen

    def forget(self) -> None:
        """Drop the table, so that the next `refresh` reads the whole file.

        Needed after an interrupt: the table may not agree with the file.
        """
        self.table = KeyValueTable()
        self.joined = 0
        self._end = 0
        self._seen = (0, 0)

    def append(self, record: Record, payload: bytes | bytearray = b"") -> None:
        """Write `record`; needs a `refresh` before, under the same lock. After an exception: `forget`."""
        head = msgspec.msgpack.encode(record)
        size = os.fstat(self.fd).st_size
        if size > self._end:
            os.ftruncate(self.fd, self._end)  # an incomplete record of a killed writer
        start = PREFIX.pack(len(head), len(payload), zlib.crc32(head)) + head
        self._write(start, payload)
        if isinstance(record, JoinRecord):
            self.joined += 1

    def _write(self, *pieces: bytes | bytearray) -> None:
        at = self._end
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    written = os.pwrite(self.fd, left, at)
                    left = left[written:]
                    at += written
        except OSError as error:
            what = limit_text(error) if is_limit(error) else error.strerror
            raise StoreError(f"cannot write to the store's file {self.path!r}: {what}") from error
        self._end = at

    def _read(self, start: int, end: int) -> bytes:
        pieces = []
        while start < end:
            piece = os.pread(self.fd, min(end - start, 1 << 30), start)
            if not piece:
                break
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _replay(self, data: memoryview) -> int:
        """Apply the record at the start of `data`; returns its length, 0 when it is incomplete."""
        if len(data) < PREFIX.size:
            return 0
        head_bytes: int
        payload_bytes: int
        head_bytes, payload_bytes, crc = PREFIX.unpack(data[: PREFIX.size])
        payload_at = PREFIX.size + head_bytes
        end = payload_at + payload_bytes
        head = data[PREFIX.size : payload_at]
        if len(head) == head_bytes and zlib.crc32(head) != crc:
            raise StoreError(message("the store's file is damaged", where=f"FileStore {self.path}"))
        if end > len(data):
            return 0
        record: Record = _decode(head)
        if isinstance(record, PutRecord):
            self.table.values[record.key] = bytes(data[payload_at:end])
        elif isinstance(record, DeleteRecord):
            self.table.values.pop(record.key, None)
        else:
            self.joined += 1
        return end


def _size_and_mtime(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
