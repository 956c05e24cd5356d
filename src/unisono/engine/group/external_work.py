"""Operations of another library under way, and the calls that start them; see `external`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import TIMEOUT_MAX, RLock
from typing import TYPE_CHECKING, Any

from unisono._native import Status
from unisono.engine.backends.driver import LibraryCall, LibraryRequest, keep_for_ever
from unisono.engine.group.arguments import OBJECT_FORM
from unisono.engine.group.call_results import NOTHING, CallResult
from unisono.engine.group.work import MessageWork, Work, seconds
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, DeviceArray
from unisono.errors import GroupError, Mismatch, Timeout, message

if TYPE_CHECKING:
    from unisono.engine.group.arguments import MessageArguments
    from unisono.engine.group.external_planning import ExternalPlanner

Seconds = float | timedelta | None


def object_status(source: int, tag: int, nbytes: int) -> Status:
    """The status of an object whose encoding has so many bytes."""
    return _status(source, tag, nbytes, DTYPES.index("uint8") | OBJECT_FORM)


def _status(source: int, tag: int, nbytes: int, form: int) -> Status:
    status = Status.__new__(Status)
    status.__setstate__((source, tag, nbytes, form))
    return status


class ExternalCall:
    """A checked call, or several that the caller made as one."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        calls: list[LibraryCall],
        keep: Any,
        made: CallResult,
    ) -> None:
        self._planner, self._kind, self._calls, self._keep, self._made = planner, kind, calls, keep, made

    def __call__(self, later: bool, timeout: Seconds) -> Any:
        """Run it and return the caller's result; or start it and return the work."""
        planner = self._planner
        planner.refuse_timeout(timeout)
        work = ExternalWork(planner, self._kind, self._keep, self._made, timeout)
        try:
            work.start(self._calls, later)
            if not later:
                return work.outcome()
        except BaseException:
            planner.outstanding_messages.keep(work)  # the library continues, and writes to its buffers
            raise
        planner.outstanding_messages.keep(work)
        return work


class ExternalWork(Work):
    """Collectives under way. They progress while a caller waits for them or tests them."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        keep: Any,
        made: CallResult,
        timeout: Seconds,
    ) -> None:
        self._planner, self._kind, self._keep, self._made = planner, kind, keep, made
        self._limit_s = planner.limit_s(timeout)
        self._pending: list[LibraryRequest] = []
        self._error: GroupError | None = None
        self._lock = RLock()  # a signal handler may ask while this thread waits

    def start(self, calls: list[LibraryCall], later: bool) -> None:
        """Start all of them."""
        with self._planner.translating(self._kind):
            for call in calls:
                self._pending.append(self._planner.driver.start(call, later))

    def done(self) -> bool:
        """See `Work.done`."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it: a library's request is for one thread at a time
        try:
            while self._pending:
                try:
                    with self._planner.translating(self._kind):
                        if not self._pending[0].done():
                            return False
                        self._end_first()
                except GroupError as error:
                    self._first_failed(error)
            return True
        finally:
            self._lock.release()

    def wait(self, timeout: Seconds = None) -> None:
        """See `Work.wait`."""
        limit_s = self._limit_s if timeout is None else seconds(timeout, math.inf)
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        if not self._lock.acquire(timeout=TIMEOUT_MAX if limit_s is None else min(limit_s, TIMEOUT_MAX)):
            raise self._late(limit_s)
        try:
            while self._pending:
                try:
                    with self._planner.translating(self._kind):
                        left_s = None if limit_s is None else max(0.0, end - time.monotonic())
                        if not self._pending[0].wait(left_s):
                            break
                        self._end_first()
                except GroupError as error:
                    self._first_failed(error)
            if self._pending:
                raise self._late(limit_s)
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error

    def _late(self, limit_s: float | None) -> Timeout:
        where = f"group={self._planner.name} rank={self._planner.rank}/{self._planner.size}"
        what = f"{self._kind} is not done after {limit_s or 0.0:.3f} s"
        return Timeout(message(what, where=where, remedy="It goes on; wait again."))

    def _end_first(self) -> None:
        self._pending[0].finish()
        del self._pending[0]
        if not self._pending:
            for array in device_arrays(self._keep):
                array.give_back()
            if self._made.unpack is not None and self._error is None:
                self._made.unpack()
            self._keep = None

    def _first_failed(self, error: GroupError) -> None:
        """Continue with the other works: the library still uses their buffers."""
        self._error = self._error or error
        del self._pending[:1]

    def outcome(self) -> Any:
        """Wait; then return the result of the call."""
        self.wait()
        made = self._made.value()
        return made.tensor if isinstance(made, DeviceArray) else made

    result = outcome

    def retain_buffers(self) -> None:
        """See `Work.retain_buffers`; the library cannot be stopped."""
        if self._pending:
            keep_for_ever(self)

    def _what(self) -> str:
        return f"{self._kind} of group {self._planner.name!r}"


class ExternalMessageWork(ExternalWork, MessageWork):
    """A send or a receive by the library."""

    def __init__(self, planner: ExternalPlanner, transfer: MessageArguments, array: Any) -> None:
        """array: the buffer, as the driver's."""
        made = NOTHING if transfer.unpack is None else NOTHING._replace(unpack=self._unpack)
        super().__init__(planner, transfer.name, transfer.keep, made, transfer.timeout)
        self._transfer, self._array = transfer, array
        self._begun = self._cancelled = False
        self._moving: LibraryRequest
        # Two ranks that both send first must not wait for each other, whatever the library buffers.
        self._buffered = self._kind in ("send", "send_object") and planner.driver.device == "cpu"

    def start(self, outlives: bool = False) -> None:  # type: ignore[override]  # noqa: ARG002
        """See `MessageWork.start`."""
        driver, transfer = self._planner.driver, self._transfer
        array = driver.copy(self._array) if self._buffered else self._array
        self._planner.outstanding_messages.keep(self)  # first: a signal handler may raise right after it
        try:
            with self._planner.translating(self._kind):
                move = driver.receive if transfer.receiving else driver.send
                self._moving = move(array, transfer.rank, transfer.tag, self._kind.endswith("_object"))
            self._pending = [self._moving]
        finally:
            self._begun = True

    def _unpack(self) -> None:
        if self._transfer.unpack is not None and not self._cancelled:
            self._transfer.unpack(self._moving.nbytes)

    def _what(self) -> str:
        rank = self._transfer.rank
        other = f"rank {rank}" if rank >= 0 else "any rank"
        return f"{self._kind}, {other} of group {self._planner.name!r}"

    def done(self) -> bool:
        """See `Work.done`."""
        return self._begun and super().done()

    def _end_first(self) -> None:
        super()._end_first()
        nbytes, dtype = self._moving.nbytes, self._transfer.dtype
        if self._transfer.receiving and not self._cancelled and nbytes % ITEMSIZES[dtype]:
            what = f"a message of {nbytes} bytes came, expected whole {DTYPES[dtype]} elements"
            raise Mismatch(f"{self._what()}: {what}")
        if self._transfer.exact and not self._cancelled and nbytes != ITEMSIZES[dtype] * self._transfer.numel:
            raise Mismatch(
                f"{self._what()}: a message of {nbytes // ITEMSIZES[dtype]} elements came, expected "
                f"{self._transfer.numel}"
            )

    def _first_failed(self, error: GroupError) -> None:
        if isinstance(error, Timeout):
            keep_for_ever(self)  # the library may still move its buffer
        super()._first_failed(error)

    def failure(self) -> BaseException:
        """See `MessageWork.failure`."""
        return self._error or GroupError(f"{self._what()} failed")

    def wait_or_abort(self, timeout_s: float) -> int:  # noqa: ARG002
        """See `MessageWork.wait_or_abort`; the error is raised here."""
        if not self._buffered:
            self.wait()
        return 0

    @property
    def status(self) -> Status | None:
        """See `Work.status`."""
        if not self._transfer.receiving or not self.done() or self._error is not None or self._cancelled:
            return None
        return self.receive_status()

    def receive_status(self) -> Status:
        """See `MessageWork.receive_status`."""
        form = self._transfer.dtype | (OBJECT_FORM if self._kind.endswith("_object") else 0)
        return _status(self._moving.source, self._moving.tag, self._moving.nbytes, form)

    def cancel(self) -> bool:
        """See `Work.cancel`."""
        if not self._transfer.receiving or self.done():
            return False
        self._cancelled = self._moving.cancel()
        if self._cancelled:
            self._pending = []
        return self._cancelled

    @property
    def cancelled(self) -> bool:
        """See `Work.cancelled`."""
        return self._cancelled

    @property
    def source(self) -> int:
        """See `MessageWork.source`."""
        transfer = self._transfer
        return self._moving.source if transfer.receiving and self.done() else transfer.rank


def device_arrays(keep: Any) -> Iterator[DeviceArray]:
    """The device arrays among the objects that a call keeps alive."""
    if isinstance(keep, DeviceArray):
        yield keep
    elif isinstance(keep, (list, tuple)):
        for one in keep:
            yield from device_arrays(one)
