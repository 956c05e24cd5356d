"""`Work`: an asynchronous operation."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from unisono import _native
from unisono._native import CollectiveWork, Status
from unisono.engine.base import timeouts
from unisono.errors import GroupError


def seconds(timeout: float | timedelta | None, default_s: float) -> float:
    """A timeout in seconds; see `timeouts.seconds`."""
    return default_s if timeout is None else timeouts.seconds(timeout)


class Work(ABC):
    """An operation under way. It keeps its buffers alive; do not use them until it is done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""

    def ended(self) -> bool:
        """`done`, where it is not the caller that asks."""
        return self.done()

    @abstractmethod
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait until it has ended, and raise its error.

        Raises:
            Timeout: it has not ended within `timeout` seconds. It continues; wait again.
            PeerLost, Mismatch, Aborted: the operation failed.
        """

    def exception(self) -> BaseException | None:
        """Its error; None if it has none or is still under way."""
        if not self.done():
            return None
        try:
            self.wait()
        except GroupError as error:
            return error
        return None

    def result(self) -> Any:
        """Wait; then return the output that the call allocated, or None if the caller gave one."""
        self.wait()

    @property
    def status(self) -> Status | None:
        """The status of a receive that has ended without an error, see `Group.recv`; otherwise None."""
        return None

    def cancel(self) -> bool:
        """Cancel a receive that no message has matched; returns whether it did. Nothing else can be
        cancelled.

        Afterwards it is done, `wait` returns at once, `status` is None, and its buffer may be used again.
        """
        return False

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has cancelled it."""
        return False

    @abstractmethod
    def retain_buffers(self) -> None:
        """After its end: keep its buffers for ever if a stopped rank may still write to them."""

    @abstractmethod
    def _what(self) -> str:
        """The operation, for messages."""

    def __repr__(self) -> str:
        state = "under way"
        if self.done():
            error = self.exception()
            ended = "cancelled" if self.cancelled else "done"
            state = ended if error is None else f"failed ({type(error).__name__})"
        return f"<Work {self._what()}: {state}>"


class CompletedWork(Work):
    """Work that had ended before it was returned."""

    def _what(self) -> str:
        return "of nothing"

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return at once."""

    def retain_buffers(self) -> None:
        """Does nothing: there are no buffers."""


Work.register(CollectiveWork)


class MessageWork(Work):
    """A send or a receive: of the engine, or of another library.

    It is made before it is posted: several are checked, and then all are posted. Its buffer stays alive until
    it is done, whatever the caller does with the work.
    """

    __slots__ = ()

    @abstractmethod
    def start(self, outlives: bool = False) -> None:
        """Post it. outlives: the call ends before it does.

        Raises:
            ValueError: see `refuse_shared_memory`.  UnisonoError: no thread can be started that moves it
                after the call. Nothing was posted.
        """

    def refuse_shared_memory(self) -> None:
        """Raises ValueError: its buffer is also that of a receive under way."""

    def detach(self) -> None:
        """Let it progress while nobody waits for it."""

    @abstractmethod
    def wait_or_abort(self, timeout_s: float) -> int:
        """Wait for its end; returns the kind of fault, 0 for none. A timeout aborts the group."""

    @abstractmethod
    def failure(self) -> BaseException:
        """The error of the operation."""

    @abstractmethod
    def receive_status(self) -> Status:
        """The status of a receive whose wait has returned."""

    @property
    @abstractmethod
    def source(self) -> int:
        """The rank that sent the received message; meaningful only when done."""


MessageWork.register(_native.NativeMessageWork)


class OutstandingMessages:
    """Keeps works of another library and their buffers until they are done, whatever the caller does."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._lock = threading.RLock()  # a signal handler may close the group while this thread holds it
        self._closed = False

    def keep(self, work: Work) -> None:
        """Keep a work until it is done."""
        with self._lock:
            under_way: list[Work] = []
            for one in self._works:
                if one is not work and one.ended():
                    one.retain_buffers()
                elif one is not work:
                    under_way.append(one)
            self._works = [*under_way, work]
            if self._closed:  # meanwhile, by a signal handler or another thread
                self.close()

    def works(self) -> list[Work]:
        """The works that it keeps."""
        with self._lock:
            return list(self._works)

    def close(self) -> None:
        """Release all. Call when no thread moves bytes of their buffers any more."""
        with self._lock:
            self._closed = True
            works, self._works = self._works, []
        for work in works:
            work.retain_buffers()
