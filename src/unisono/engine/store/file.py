"""`FileStore`: a store in one file, for processes that share a file system.

When is a file left by an earlier run? **When no process has it open.** A process that opens the store holds a
shared lock on it until it closes the store or ends. The kernel (on NFS the lock server) releases the lock,
whether the process returned, crashed or was killed. Opening the file first tries to get it exclusively:

    got it          no process has it open: the contents are from an earlier run, and are dropped
    did not get it  a run is under way, and the process joins it

This uses no pids, clocks or ages, so it also works across containers, hosts and reboots.
Three consequences:

- A store exists while a process has it open. A process that closes it before the others have joined waits
  for them briefly (`linger_s`); the last one to close it deletes the file.
- On NFS the locks of a host that lost power stay until their lease ends (usually 90 s). Until then a new run
  joins the old one, and `rendezvous` says which rank is taken by whom.
- The file system needs locks that work between all hosts of the run (not NFS mounted with `nolock` or
  `local_lock=all`). A file system without locks is refused with an error.

Every change writes the whole table, and every process keeps all values in memory: it is made for a
rendezvous, not for bulk data.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from unisono.engine.base.timeouts import seconds
from unisono.engine.base.validation import whole
from unisono.engine.store.base import Store, close_in_children
from unisono.engine.store.log import StoreLog, is_store
from unisono.engine.store.operations import Add, CompareSet, Delete, Op, Reply, Set
from unisono.errors import StoreError, StoreTimeout, message

POLL_S = (0.001, 0.02)  # pause between looks at the file while waiting: first, longest
LEAVE_S = 1.0  # for the locks, when leaving
REREAD_S = 0.25  # read under the lock at least this often: shared file systems cache sizes


def wait_for_end(path: str, timeout_s: float) -> None:
    """Wait until no process has the store of a file open, and delete it. A file that is no store's stays.

    Raises:
        StoreTimeout: processes still had it open after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while is_store(path):
        log = StoreLog(path)
        try:
            with log.locked(deadline, writing=True):
                if log.is_at_path() and log.claim_alone():
                    os.unlink(path)
                    return
        finally:
            log.close()
        if time.monotonic() >= deadline:
            raise StoreTimeout(
                message(
                    "processes of another group still have the file open",
                    where=f"FileStore {path}",
                    remedy="Close that group on every rank first, or take another file.",
                )
            )
        time.sleep(POLL_S[1])


class FileStore(Store):
    """Keys and values in the file `path`. It is created, and the last process to close the store deletes it.

    Args:
        path: absolute, or relative to the working directory; the same file for all.
        world_size: how many processes open it in one run; `close()` by the only one present waits for them.
        linger_s: the most seconds of that wait.
        timeout_s: seconds for opening, and for a call without a timeout of its own.

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
            linger_s: the most seconds to wait for others, instead of the constructor's.
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
                pass  # the guard leaves when it is released; if another call holds it, that call leaves

    def _forget(self) -> None:
        self._log.close()

    @contextlib.contextmanager
    def _held(self, deadline: float) -> Iterator[None]:
        """Exclude other users of the log: other threads, and a signal handler (or a finalizer that the
        garbage collector runs) inside a call of this thread. Releasing a closed store leaves it.

        Raises:
            StoreTimeout: another thread was busy until `deadline`.
            StoreError: this call interrupts the busy one, and would wait for it for ever.
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
                if self._closed:  # an excluded user may have closed it
                    self._leave()
        finally:
            self._guard.release()

    # Joining and leaving.

    def _open(self, deadline: float) -> StoreLog:
        while True:
            log = StoreLog(self.path)
            try:
                if self._join(log, deadline):
                    return log
            except BaseException:
                log.close()
                raise
            log.close()

    def _join(self, log: StoreLog, deadline: float) -> bool:
        """Join the run in `log`, or begin one; False when the file was just deleted at the end of a run."""
        with log.locked(deadline, writing=True):
            if not log.is_at_path():
                return False
            if log.claim_alone():
                log.begin()
            log.claim_shared()
            log.refresh()
            log.joined += 1
            log.record()
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
            return  # the file is gone, the store is closed, or its lock is not available: do not wait

    def _leave(self) -> None:
        if self._log.fd < 0:
            return
        try:
            with self._log.locked(time.monotonic() + LEAVE_S, writing=True):
                if self._log.claim_alone() and self._log.is_at_path():
                    os.unlink(self.path)
                self._log.claim_nothing()  # before the next process to leave checks whether it is alone
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
                if table.values.get(op.key) is not before:
                    self._log.record()
            except BaseException:  # Ctrl-C may have come before or after the file was written
                self._log.forget()
                raise
            return reply
