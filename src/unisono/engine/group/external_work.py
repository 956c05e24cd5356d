"""Operations of another library under way, and the calls that start them; see `external`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono._native import Status
from unisono.engine.backends.driver import Call, Pending
from unisono.engine.group.results import Made
from unisono.engine.group.work import MessageWork, Work, seconds
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, DeviceArray
from unisono.errors import GroupError, Mismatch, Timeout, message

if TYPE_CHECKING:
    from unisono.engine.group.external import ExternalPlanner

__all__ = ["ExternalCall", "ExternalMessage", "ExternalWork", "device_arrays"]

_OBJECT_FORM = 1 << 8
Seconds = float | timedelta | None


class ExternalCall:
    """A checked call, or several that the caller made as one."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        calls: list[Call],
        keep: Any,
        made: Made,
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
            planner.keep(work)  # the library continues, and writes to its buffers
            raise
        planner.keep(work)
        return work


class ExternalWork(Work):
    """Collectives under way. They progress while a caller waits for them or tests them."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        keep: Any,
        made: Made,
        timeout: Seconds,
    ) -> None:
        self._planner, self._kind, self._keep, self._made = planner, kind, keep, made
        self._limit_s = planner.limit_s(timeout)
        self._pending: list[Pending] = []
        self._error: GroupError | None = None

    def start(self, calls: list[Call], later: bool) -> None:
        """Start all of them."""
        with self._planner.translating(self._kind):
            for call in calls:
                self._pending.append(self._planner.driver.start(call, later))

    def done(self) -> bool:
        """See `Work.done`."""
        while self._pending:
            try:
                with self._planner.translating(self._kind):
                    if not self._pending[0].done():
                        return False
                    self._end_first()
            except GroupError as error:
                self._first_failed(error)
        return True

    def wait(self, timeout: Seconds = None) -> None:
        """See `Work.wait`."""
        limit_s = self._limit_s if timeout is None else seconds(timeout, math.inf)
        end = None if limit_s is None else time.monotonic() + limit_s
        while self._pending:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            try:
                with self._planner.translating(self._kind):
                    ended = self._pending[0].wait(left_s)
                    if ended:
                        self._end_first()
            except GroupError as error:
                self._first_failed(error)
                continue
            if not ended:
                where = f"group={self._planner.name} rank={self._planner.rank}/{self._planner.size}"
                what = f"{self._kind} is not done after {limit_s:.3f} s"
                raise Timeout(message(what, where=where, remedy="It goes on; wait again."))
        if self._error is not None:
            raise self._error

    def _end_first(self) -> None:
        self._pending[0].finish()
        del self._pending[0]
        if not self._pending:
            for array in device_arrays(self._keep):
                array.give_back()
            self._keep = None

    def _first_failed(self, error: GroupError) -> None:
        """Continue with the other works: the library still uses their buffers."""
        self._error = self._error or error
        del self._pending[0]

    def outcome(self) -> Any:
        """Wait; then return the result of the call."""
        self.wait()
        made = self._made.value()
        return made.tensor if isinstance(made, DeviceArray) else made

    result = outcome

    def let_go(self) -> None:
        """The library keeps its buffers."""

    def _what(self) -> str:
        return f"{self._kind} of group {self._planner.name!r}"


class ExternalMessage(MessageWork):
    """A send or a receive by the library."""

    __slots__ = (
        "_array", "_buffered", "_cancelled", "_dtype", "_error", "_limit_s", "_name", "_pending", "_planner",
        "_rank", "_settled", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        planner: ExternalPlanner,
        name: str,
        array: Any,
        dtype: int,
        rank: int,
        tag: int,
        timeout: Seconds,
        keep: Any,
        receiving: bool,
    ) -> None:
        self._planner, self._name, self._array, self._dtype = planner, name, array, dtype
        self._rank, self._tag, self._keep, self._receiving = rank, tag, keep, receiving
        self._limit_s = planner.limit_s(timeout)
        self._begun = self._settled = self._cancelled = False
        self._error: GroupError | None = None
        self._pending: Pending
        # Two ranks that both send first must not wait for each other, whatever the library buffers.
        self._buffered = name in ("send", "send_object") and planner.driver.device == "cpu"

    def start(self) -> None:
        """See `MessageWork.start`."""
        driver = self._planner.driver
        is_object = self._name.endswith("_object")
        array = driver.copy(self._array) if self._buffered else self._array
        with self._planner.translating(self._name):
            move = driver.receive if self._receiving else driver.send
            self._pending = move(array, self._rank, self._tag, is_object)
        self._begun = True
        self._planner.keep(self)

    def _what(self) -> str:
        other = f"rank {self._rank}" if self._rank >= 0 else "any rank"
        return f"{self._name}, {other} of group {self._planner.name!r}"

    def done(self) -> bool:
        """See `Work.done`."""
        if self._begun and not self._settled:
            try:
                with self._planner.translating(self._name):
                    if self._pending.done():
                        self._settle()
            except GroupError as error:
                self._fail(error)
        return self._settled

    def wait(self, timeout: Seconds = None) -> None:
        """See `Work.wait`."""
        if not self._settled:
            limit_s = self._limit_s if timeout is None else seconds(timeout, math.inf)
            try:
                with self._planner.translating(self._name):
                    if not self._pending.wait(limit_s):
                        raise Timeout(
                            f"{self._what()}: not done after {limit_s:.3f} s. It goes on; wait again."
                        )
                    self._settle()
            except Timeout:
                raise
            except GroupError as error:
                self._fail(error)
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        self._pending.finish()
        self._settled = True
        for array in device_arrays(self._keep):
            array.give_back()
        item = ITEMSIZES[self._dtype]
        if self._receiving and not self._cancelled and self._pending.nbytes % item:
            raise Mismatch(
                f"{self._what()}: a message of {self._pending.nbytes} bytes came, expected whole "
                f"{DTYPES[self._dtype]} elements"
            )
        self._keep = None

    def _fail(self, error: GroupError) -> None:
        self._error, self._settled = error, True

    def let_go(self) -> None:
        """The library keeps its buffers."""

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
        if not self._receiving or not self.done() or self._error is not None or self._cancelled:
            return None
        return self.came()

    def came(self) -> Status:
        """See `MessageWork.came`."""
        form = self._dtype | (_OBJECT_FORM if self._name.endswith("_object") else 0)
        status = Status.__new__(Status)
        status.__setstate__((self._pending.source, self._pending.tag, self._pending.nbytes, form))
        return status

    def cancel(self) -> bool:
        """See `Work.cancel`."""
        if not self._receiving or self.done():
            return False
        self._cancelled = self._settled = self._pending.cancel()
        return self._cancelled

    @property
    def cancelled(self) -> bool:
        """See `Work.cancelled`."""
        return self._cancelled

    @property
    def source(self) -> int:
        """See `MessageWork.source`."""
        return self._pending.source if self._receiving and self.done() else self._rank


def device_arrays(keep: Any) -> Iterator[DeviceArray]:
    """The device arrays among the objects that a call keeps alive."""
    if isinstance(keep, DeviceArray):
        yield keep
    elif isinstance(keep, (list, tuple)):
        for one in keep:
            yield from device_arrays(one)
