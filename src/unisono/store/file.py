"""`FileStore`: a store in one file, for processes that share a file system.

When is a file left by an earlier run? **When no process has it open.** Everyone who opens the store holds a
shared lock on it until it closes the store or ends; the kernel (on NFS the lock server) sees to that, whether
the process returned, crashed or was killed. Who opens the file tries for that lock exclusively first:

    got it          nobody is there: whatever is in the file is of an earlier run, and is dropped
    did not get it  a run is going on, and is joined

No process ids are compared, no clocks, no ages: so it holds across containers, hosts and reboots.
Three consequences:

- A store lives as long as somebody has it open. Who closes it first, alone, before the others came, waits for
  them a moment (`linger_s`); the last one to close it deletes the file.
- On NFS the locks of a host that lost power stay until their lease ends (usually 90 s). Until then a new run
  joins the old one, and `rendezvous` says which rank is taken by whom.
- The file system has to have locks that work between all hosts concerned (not NFS mounted with `nolock` or
  `local_lock=all`). One without any locks is refused with an error.

The file only grows while it is in use, and every process keeps all values in memory: made for bringing
ranks together, not for bulk data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

from unisono.checking import whole
from unisono.errors import StoreError, StoreTimeout, message
from unisono.store.base import Store, close_in_children
from unisono.store.log import Joined, Log, Put, Removed
from unisono.store.ops import Add, CompareSet, Delete, Op, Reply, Set
from unisono.timeouts import seconds

__all__ = ["FileStore"]

POLL_S = (0.001, 0.02)  # pause between looks at the file while waiting: first, longest
LEAVE_S = 1.0  # for the locks, when leaving
REREAD_S = 0.25  # look under the lock at least so often: shared file systems cache sizes


class FileStore(Store):
    """Keys and values in the file `path`, which is created, and deleted by the last one to close the store.

    Args:
        path: absolute, or relative to the working directory; the same file for all.
        world_size: how many open it in one run; `close()` by the only one present waits for them.
        linger_s: seconds of that wait, at most.
        timeout_s: seconds for opening, and for any single call that does not say otherwise.

    Raises:
        StoreError: the file cannot be opened, is something else, or its file system has no locks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int | None = None,
        *,
        timeout_s: float = 300.0,
        linger_s: float = 5.0,
    ) -> None:
        super().__init__(timeout_s)
        self.path = os.path.abspath(os.fspath(path))
        self._world_size = 0 if world_size is None else whole(world_size, "world_size", 0)
        self._linger_s = seconds(linger_s, name="linger_s", or_none=True)
        self._guard = threading.RLock()
        self._busy = False
        self._log = self._open(time.monotonic() + self._timeout_s)
        self._reread_at = 0.0
        close_in_children(self._forget)

    def describe(self) -> str:
        return f"FileStore {self.path}"

    def close(self, linger_s: float | None = None) -> None:
        """Leave; the last one deletes the file.

        Args:
            linger_s: at most so many seconds of waiting for others to come, instead of the constructor's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            patience_s = (
                self._linger_s if linger_s is None else seconds(linger_s, name="linger_s", or_none=True)
            )
            self._await_others(time.monotonic() + patience_s)
        finally:
            super().close()
            with contextlib.suppress(StoreError), self._held(time.monotonic() + LEAVE_S):
                pass  # this was the guard's last work; if another call has it, that one leaves

    def _forget(self) -> None:
        self._log.close()

    @contextlib.contextmanager
    def _held(self, deadline: float) -> Iterator[None]:
        """Keep others from the log: other threads, and a signal handler (or a finalizer that the garbage
        collector runs) in the middle of a call of this very thread. Who lets go of a closed store leaves it.

        Raises:
            StoreTimeout: another thread was busy until `deadline`.
            StoreError: the busy one is what we interrupt, and waiting for it would be for ever.
        """
        if not self._guard.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreTimeout(message("another thread keeps the store busy", where=self.describe()))
        try:
            if self._busy:
                raise StoreError(
                    message(
                        "a signal handler (or finalizer) called the store in the middle of another call",
                        where=self.describe(),
                        remedy="Note the signal in the handler, and call the store after it has returned.",
                    )
                )
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                if self._closed:  # it may have been closed by whom we kept from the log
                    self._leave()
        finally:
            self._guard.release()

    # Coming and going.

    def _open(self, deadline: float) -> Log:
        while True:
            log = Log(self.path)
            try:
                if self._join(log, deadline):
                    return log
            except BaseException:
                log.close()
                raise
            log.close()

    def _join(self, log: Log, deadline: float) -> bool:
        """Join the run in `log`, or begin one; False when the last one of a run has just deleted the file."""
        with log.locked(deadline, writing=True):
            if not log.is_at_path():
                return False
            if log.claim_alone():
                log.begin()
            log.claim_shared()
            log.refresh()
            log.append(Joined(socket.gethostname(), os.getpid()))
            return True

    def _await_others(self, deadline: float) -> None:
        """Wait while this process is alone and others are still expected."""
        try:
            while time.monotonic() < deadline:
                with self._held(deadline):
                    self._check_usable()
                    with self._log.locked(deadline, writing=True):
                        self._log.refresh()
                        alone = self._log.claim_alone()
                        self._log.claim_shared()
                if self._log.joined >= self._world_size or not alone:
                    return
                time.sleep(POLL_S[1])
        except StoreError:
            return  # the file is gone, the store closed or its lock not to be had: nothing to wait for

    def _leave(self) -> None:
        if self._log.fd < 0:
            return
        try:
            with self._log.locked(time.monotonic() + LEAVE_S, writing=True):
                if self._log.claim_alone() and self._log.is_at_path():
                    os.unlink(self.path)
                self._log.claim_nothing()  # before the next one to leave asks whether it is alone
        except (StoreError, OSError):
            pass  # it cannot be deleted: the next run finds no process present, and drops its contents
        finally:
            self._log.close()

    # Operations.

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        deadline = time.monotonic() + timeout_s
        pause_s = POLL_S[0]
        while True:
            reply = self._attempt(op, payload, deadline)
            left = deadline - time.monotonic()
            if not reply.missing or left <= 0 or not self._log.table.missing(op):
                return reply
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, POLL_S[1])

    def _attempt(self, op: Op, payload: bytes, deadline: float) -> Reply:
        with self._held(deadline):
            self._check_usable()
            if isinstance(op, (Set, Add, CompareSet, Delete)):
                return self._write(op, payload, deadline)
            return self._read(op, deadline)

    def _read(self, op: Op, deadline: float) -> Reply:
        missing = self._log.table.missing(op)
        now = time.monotonic()
        if missing and self._log.unchanged() and now < self._reread_at:
            return Reply(missing=missing)
        with self._log.locked(deadline, writing=False):
            self._log.refresh()
            self._reread_at = now + REREAD_S
        return self._log.table.apply(op)

    def _write(self, op: Set | Add | CompareSet | Delete, payload: bytes, deadline: float) -> Reply:
        with self._log.locked(deadline, writing=True):
            self._log.refresh()
            table = self._log.table
            before = table.values.get(op.key)
            try:
                reply = table.apply(op, payload)
                after = table.values.get(op.key)
                if after is not before:
                    self._log.append(Removed(op.key) if after is None else Put(op.key), after or b"")
            except BaseException:  # an interrupt may have come before or after the record was complete
                self._log.forget()
                raise
            return reply
