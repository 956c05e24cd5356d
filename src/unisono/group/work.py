"""`Work`: an operation that goes on while the caller does something else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unisono import _native
from unisono._native import FaultKind
from unisono.errors import GroupError, Timeout
from unisono.group.faults import Scene, explain, late

__all__ = ["NEVER_QUEUED", "CollectiveWork", "DoneWork", "MessageWork", "Work", "seconds"]

NEVER_QUEUED = 0
"""The ticket of a collective that the engine did not take: any engine is past it."""
_NOT_YET = (1 << 64) - 2
"""No engine comes to this one before its end."""


def seconds(timeout: float | timedelta | None, default_s: float) -> float:
    """A timeout in seconds.

    Raises:
        ValueError: it is not positive.
    """
    if timeout is None:
        return default_s
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value > 0:
        raise ValueError(f"timeout is {value} s, expected a positive number of seconds")
    return value


class Work(ABC):
    """An operation under way. Its buffers belong to it until it is done; it keeps them alive."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not."""

    @abstractmethod
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait until it has ended, and raise what went wrong.

        Raises:
            Timeout: it has not ended within `timeout` seconds. It goes on; wait again.
            PeerLost, Mismatch, Aborted: what ended it.
        """

    def exception(self) -> BaseException | None:
        """What went wrong, None when nothing did or it is still under way."""
        if not self.done():
            return None
        try:
            self.wait()
        except GroupError as error:
            return error
        return None

    @abstractmethod
    def let_go(self) -> None:
        """After its end: keep its buffers for ever if a rank that was stopped may still write to them."""

    @abstractmethod
    def _what(self) -> str:
        """The operation, for people."""

    def __repr__(self) -> str:
        state = "under way"
        if self.done():
            error = self.exception()
            state = "done" if error is None else f"failed ({type(error).__name__})"
        return f"<Work {self._what()}: {state}>"


class DoneWork(Work):
    """Work that had ended before it was handed out."""

    def _what(self) -> str:
        return "of nothing"

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return at once."""

    def let_go(self) -> None:
        """There are no buffers."""


class CollectiveWork(Work):
    """A queued collective: done when the engine has come to its ticket.

    It is made, and kept, before it is queued: a signal handler that raises in between takes no buffer away.
    One whose ticket was lost in this way is not done before the group's end.

    Attributes:
        ticket: the engine's number of it, once it is queued.  heard: its error has been raised.
    """

    __slots__ = ("_engine", "_keep", "_scene", "heard", "ticket")

    def __init__(self, engine: _native.Engine, keep: Any, scene: Scene) -> None:
        """`keep`: its buffers."""
        self.heard = False
        self.ticket = _NOT_YET
        self._engine = engine
        self._keep = keep
        self._scene = scene

    def _what(self) -> str:
        return f"{self._scene.operation}, queued as {self.ticket} of group {self._scene.group!r}"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._engine.done(self.ticket)

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """See `Work.wait`."""
        kind = self._engine.wait(self.ticket, seconds(timeout, float("inf")))
        if kind == FaultKind.TIMEOUT and self.done():  # it ended in this very moment
            kind = self._engine.wait(self.ticket, 1.0)
        if kind == FaultKind.TIMEOUT and not self._engine.fault()[0]:
            raise Timeout(late(self._scene, seconds(timeout, 0.0)))
        if kind:
            self.let_go()
            self.heard = True
            raise explain(self._scene)

    def let_go(self) -> None:
        """See `Work.let_go`."""
        self._engine.hold(self._keep)


class MessageWork(Work):
    """A send or receive on its way.

    It is made before it is posted, so that whoever posts it can keep it when a signal handler raises. One
    whose request was lost in this way is not done before the group's end.
    """

    __slots__ = ("_begun", "_engine", "_keep", "_post", "_request", "_scene")
    _request: _native.Request

    def __init__(
        self, engine: _native.Engine, post: Callable[[], _native.Request], keep: Any, scene: Scene
    ) -> None:
        """`post`: hands it to the engine; `keep`: its buffer."""
        self._begun = False
        self._engine = engine
        self._post = post
        self._keep = keep
        self._scene = scene

    def start(self) -> None:
        """Post it."""
        self._request = self._post()
        self._begun = True

    def _what(self) -> str:
        peer = self._request.peer
        other = f"rank {peer}" if peer >= 0 else "any rank"
        return f"{self._scene.operation}, {other} of group {self._scene.group!r}"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._begun and self._request.done

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """See `Work.wait`."""
        kind = self._engine.wait_request(self._request, seconds(timeout, float("inf")), False)
        if kind == FaultKind.TIMEOUT and self.done():
            kind = self._engine.wait_request(self._request, 1.0, False)
        if kind == FaultKind.TIMEOUT and not self._engine.fault()[0]:
            raise Timeout(late(self._scene, seconds(timeout, 0.0)))
        if kind:
            self.let_go()
            raise explain(self._scene)

    def let_go(self) -> None:
        """See `Work.let_go`."""
        self._engine.hold(self._keep)

    def failure(self) -> BaseException:
        """The error for what went wrong."""
        self.let_go()
        return explain(self._scene)

    def wait_or_abort(self, timeout_s: float) -> int:
        """Wait for its end; the kind of fault, 0 for none. Running out of time aborts the group."""
        return self._engine.wait_request(self._request, timeout_s, True)

    @property
    def source(self) -> int:
        """The rank a received message came from. Only of meaning when done."""
        return self._request.peer
