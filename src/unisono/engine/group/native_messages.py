"""A send or a receive by the engine, under way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from unisono import _native
from unisono._native import FaultKind, Status
from unisono.engine.diagnosis.fault_reader import FaultContext, read, read_late
from unisono.engine.diagnosis.fault_text import error
from unisono.engine.group.work import MessageWork, seconds


class NativeMessageWork(MessageWork):
    """A send or a receive by the engine."""

    __slots__ = ("_begun", "_context", "_engine", "_extent", "_keep", "_post", "_receiving", "_request")
    _request: _native.Request

    def __init__(
        self,
        engine: _native.Engine,
        post: Callable[[], _native.Request | None],
        extent: tuple[int, int],
        keep: Any,
        context: Callable[[], FaultContext],
        receiving: bool,
    ) -> None:
        """`post`: passes it to the engine; None: its memory is in use.  `extent`: address and bytes of its
        buffer.  `keep`: the buffer.  `context`: where it fails, asked when it does.
        """
        self._receiving = receiving
        self._begun = False
        self._engine = engine
        self._post = post
        self._extent = extent
        self._keep = keep
        self._context = context

    def start(self) -> None:
        """See `MessageWork.start`."""
        request = self._post()
        if request is None:
            self._refuse()
        self._request = request
        self._begun = True

    def refuse_shared_memory(self) -> None:
        """See `MessageWork.refuse_shared_memory`."""
        if self._engine.receives_into(*self._extent):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self._context().operation}: the buffer shares memory with that of a receive under way on this "
            "rank; wait for that receive first, or use another buffer"
        )

    def detach(self) -> None:
        """See `MessageWork.detach`."""
        self._engine.detach()

    def _what(self) -> str:
        peer = self._request.peer
        other = f"rank {peer}" if peer >= 0 else "any rank"
        return f"{self._context().operation}, {other} of group {self._context().group!r}"

    def done(self) -> bool:
        """See `Work.done`."""
        if not self.ended():
            return False
        self._request.see()
        self._release_buffer()
        return True

    def ended(self) -> bool:
        """See `Work.ended`."""
        return self._begun and self._request.done

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """See `Work.wait`."""
        kind = self._engine.wait_request(self._request, seconds(timeout, float("inf")), False)
        if kind == FaultKind.TIMEOUT and self.done():
            kind = self._engine.wait_request(self._request, 1.0, False)
        if kind == FaultKind.TIMEOUT and not self._engine.faulted:
            raise error(read_late(self._context(), seconds(timeout, 0.0)))
        if kind:
            self._release_buffer()
            raise error(read(self._context()))
        self._keep = None  # the engine no longer uses the buffer

    def retain_buffers(self) -> None:
        """See `Work.retain_buffers`.

        The buffer stays until the caller knows of the end: its address counts as that of the receive.
        """
        self._engine.hold(self._keep)

    def _release_buffer(self) -> None:
        self.retain_buffers()
        self._keep = None

    def failure(self) -> BaseException:
        """See `MessageWork.failure`."""
        self._release_buffer()
        return error(read(self._context()))

    def wait_or_abort(self, timeout_s: float) -> int:
        """See `MessageWork.wait_or_abort`."""
        return self._engine.wait_request(self._request, timeout_s, True)

    @property
    def status(self) -> Status | None:
        """See `Work.status`."""
        if not self._receiving or not self.done() or self._request.fault or self.cancelled:
            return None
        return self._request.status

    def receive_status(self) -> Status:
        """See `MessageWork.receive_status`."""
        return self._request.status

    def cancel(self) -> bool:
        """See `Work.cancel`."""
        return self._begun and self._engine.cancel(self._request)

    @property
    def cancelled(self) -> bool:
        """See `Work.cancelled`."""
        return self.done() and self._request.cancelled

    @property
    def source(self) -> int:
        """See `MessageWork.source`."""
        return self._request.peer
