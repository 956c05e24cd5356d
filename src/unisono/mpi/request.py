"""`Request`: an operation that the program waits for; `Prequest`: one that it starts again and again."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono._native import RequestBase
from unisono.mpi import constants
from unisono.mpi.errors import Error, Exception, wrong_class
from unisono.mpi.handle import Handle, State
from unisono.mpi.progress import Operation, Parts, Pause, move_all, under_way
from unisono.mpi.status import Status, check_status, fill_status
from unisono.mpi.transport import operation_of


class Persistent(State):
    """The state of a persistent request. operation: None: it is inactive."""

    operation: Operation | None = None

    def __init__(self, start: Callable[[], Operation]) -> None:
        self.start = start


def _each(requests: Iterable[Request], wait: Callable[[Request], Any]) -> None:
    """Wait for each. The error of one whose message was too long comes when all have ended."""
    first = None
    for one in requests:
        try:
            wait(one)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


class Request(RequestBase, Handle):
    """An operation under way. After its end it is null."""

    _null = constants.ERR_REQUEST
    _schedules = under_way

    @staticmethod
    def _operation_of(work: Any, state: Any) -> Operation:
        return operation_of(state.world, work, state.places)

    def _operation(self) -> Operation | None:
        state = self._state
        return state.operation if isinstance(state, Persistent) else state

    def _conclude(self, status: Status | None) -> Any:
        """After the end: fill the status, forget the operation, return its value."""
        operation = self._operation()
        fill_status(status, operation)
        if operation is None:
            return None
        if isinstance(self._state, Persistent):
            self._state.operation = None
        else:
            self._state = None
        return operation.value

    def _ended(self) -> bool:
        """Whether it has ended; a failure ends it, too."""
        operation = self._operation()
        try:
            return operation is None or operation.poll()
        except BaseException:
            self._conclude(None)
            raise

    def _block(self) -> None:
        operation = self._operation()
        try:
            if operation is not None and not operation.done:
                operation.block()
        except BaseException:
            if operation is not None and operation.done:
                self._conclude(None)
            raise

    def _end(self, status: Status | None) -> Any:
        """Wait for its end, and conclude it: what `RequestBase` leaves to Python."""
        check_status(status)
        self._block()
        return self._conclude(status)

    # ---- one request

    def Test(self, status: Status | None = None) -> bool:
        """Whether it has ended."""
        return Request.test(self, status)[0]  # a subclass's own `test` may call this

    def Get_status(self, status: Status | None = None) -> bool:
        """Whether it has ended; the request stays."""
        move_all()
        if not self._ended():
            return False
        fill_status(status, self._operation())
        return True

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched."""
        operation = self._operation()
        if operation is None:
            raise Exception(constants.ERR_REQUEST, "the request is null or inactive")
        operation.cancel()

    Free = Handle._free

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """(whether it has ended, the object)."""
        move_all()
        if not self._ended():
            return False, None
        return True, self._conclude(status)

    get_status, cancel = Get_status, Cancel
    # ---- several requests. Uppercase calls give what lowercase ones do, without the objects.

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Wait for all. Returns True."""
        if statuses is not None:
            cls.waitall(requests, statuses)
            return True
        _check(requests)
        _each(requests, Request.Wait)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Wait for all; returns their objects."""
        _check(requests, statuses or ())
        _each(requests, Request._block)
        return [one._conclude(status) for one, status in _paired(requests, statuses)]

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Whether all have ended."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[bool, Any]:
        """(whether all have ended, their objects)."""
        ended = cls._ended_of(requests)
        if ended is not None and len(ended) < sum(map(_active, requests)):
            return False, None
        return True, [one._conclude(status) for one, status in _paired(requests, statuses)]

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Whether all have ended; the requests stay."""
        ended = cls._ended_of(requests)
        if ended is not None and len(ended) < sum(map(_active, requests)):
            return False
        for one, status in _paired(requests, statuses):
            fill_status(status, one._operation())
        return True

    @staticmethod
    def _ended_of(requests: Sequence[Request]) -> list[int] | None:
        """The indices of those that have ended; None: none is active. Each of them moves."""
        move_all()
        active = [index for index, one in enumerate(requests) if _active(one)]
        return [index for index in active if requests[index]._ended()] if active else None

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Wait for one; returns its index, or UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Wait for one; returns its index and its object."""
        pause = Pause()
        while not (found := cls.testany(requests, status))[1]:
            pause()
        return found[0], found[2]

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """(the index of one that has ended, whether there is one)."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """(the index of one that has ended, whether there is one, its object)."""
        index, found = cls._look(requests)
        if index == constants.UNDEFINED:
            fill_status(status if found else None, None)
            return index, found, None
        return index, True, requests[index]._conclude(status)

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """As `Testany`; the requests stay."""
        index, found = cls._look(requests)
        if found:
            fill_status(status, None if index == constants.UNDEFINED else requests[index]._operation())
        return index, found

    @staticmethod
    def _look(requests: Sequence[Request]) -> tuple[int, bool]:
        """(the index of one that has ended, True); (UNDEFINED, whether none is active)."""
        active = [index for index, one in enumerate(requests) if _active(one)]
        move_all()
        ended = next((index for index in active if requests[index]._ended()), constants.UNDEFINED)
        return ended, ended != constants.UNDEFINED or not active

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Wait for at least one; returns the indices of those that have ended, or None if none is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        """Wait for at least one; returns (indices, objects)."""
        pause = Pause()
        while not (found := cls.testsome(requests, statuses))[0] and found[0] is not None:
            pause()
        return found

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """The indices of those that have ended, or None if none is active."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        """(indices of those that have ended, their objects); (None, None) if none is active."""
        ended = cls._ended_of(requests)
        chosen = _paired([requests[index] for index in ended or ()], statuses)
        objects = [one._conclude(status) for one, status in chosen]
        return ended, None if ended is None else objects

    @classmethod
    def Get_status_some(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> list[int] | None:
        """As `Testsome`; the requests stay."""
        ended = cls._ended_of(requests)
        for one, status in _paired([requests[index] for index in ended or ()], statuses):
            fill_status(status, one._operation())
        return ended

    get_status_any, get_status_all, get_status_some = Get_status_any, Get_status_all, Get_status_some


class Prequest(Request):
    """An operation that can be started again after its end."""

    def _adopt(self, other: Any) -> None:
        if isinstance(other._state, Operation):
            raise TypeError("this request is not persistent")
        super()._adopt(other)

    @classmethod
    def _starting(cls, start: Callable[[], Operation]) -> Any:
        return cls._of(Persistent(start))

    def Start(self) -> None:
        """Start it."""
        if not isinstance(self._state, Persistent):
            raise Exception(constants.ERR_REQUEST, "the request is null or not persistent")
        if self._state.operation is not None:
            raise Exception(constants.ERR_REQUEST, "the request is under way")
        self._state.operation = self._state.start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several."""
        for one in requests:
            Prequest.Start(one)

    # ---- of parts: one that is sent when all its parts are ready

    def _parts(self) -> Parts:
        found = self._operation()
        if not isinstance(found, Parts):
            raise Exception(constants.ERR_REQUEST, "the request has no parts, or is not under way")
        return found

    def Pready(self, partition: int) -> None:
        """A part may be sent."""
        self._parts().ready([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Parts up to and with the last may be sent."""
        self._parts().ready(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """These parts may be sent."""
        self._parts().ready(partitions)

    def Parrived(self, partition: int) -> bool:
        """Whether a part has arrived: all do at once."""
        found = self._operation()
        if found is None:
            return True
        if not isinstance(found, Parts) or not 0 <= partition < max(found.count, 1):
            raise Exception(constants.ERR_ARG, f"there is no part {partition}")
        return found.poll()


def _check(requests: Sequence[Request], statuses: Sequence[Status] = ()) -> None:
    for one in requests:
        if not isinstance(one, Request):
            raise wrong_class("requests", "a sequence of Request", one)
    for status in statuses:
        check_status(status)


def _active(request: Request) -> bool:
    return request._operation() is not None


def _paired(requests: Sequence[Request], statuses: list[Status] | None) -> list[tuple[Request, Any]]:
    """Each request with its status; a list of statuses that is too short grows."""
    number, given = len(requests), () if statuses is None else statuses
    if isinstance(given, list):
        given += [Status() for _ in range(number - len(given))]
    return list(zip(requests, [*given[:number], *[None] * (number - len(given))], strict=True))


REQUEST_NULL = Request()


class _General(Operation):
    """An operation that the program itself performs."""

    def __init__(self, functions: Any, args: Any, kargs: Any) -> None:
        self.query, self.free, self.cancelling = functions
        self.args, self.kargs = args or (), kargs or {}
        self.status: Any = None
        self.complete = False

    def poll(self) -> bool:
        if self.complete and not self.done:
            self.done = True
            self.status = Status()
            self.status._set(constants.ANY_SOURCE, constants.ANY_TAG, 0)
            self._call(self.query, self.status)
            self.source, self.tag, self.nbytes = self.status._source, self.status._tag, self.status._nbytes
            self.cancelled = self.status._cancelled
            self._call(self.free)
        return self.done

    def cancel(self) -> None:
        self._call(self.cancelling, self.complete)

    def _call(self, function: Any, *first: Any) -> None:
        """Call a function of the program's; its error becomes one of MPI."""
        if function is None:
            return
        try:
            function(*first, *self.args, **self.kargs)
        except Exception:
            traceback.print_exc()
            raise
        except Error as error:
            traceback.print_exc()
            raise Exception(constants.ERR_OTHER, str(error)) from error


class Grequest(Request):
    """A request whose operation the program performs, and completes."""

    @classmethod
    def Start(
        cls, query_fn: Any = None, free_fn: Any = None, cancel_fn: Any = None, args: Any = None,
        kargs: Any = None,
    ) -> Grequest:  # fmt: skip
        """A request that ends with `Complete`. query_fn(status, ...) fills its status."""
        made: Grequest = cls._for(_General((query_fn, free_fn, cancel_fn), args, kargs))
        made._general = made._state
        return made

    _general: Any = None

    def _adopt(self, other: Any) -> None:
        found = other._operation()
        if other._state is not None and not isinstance(found, _General):
            raise TypeError("this request is not general")
        super()._adopt(other)
        self._general = found

    def Complete(self) -> None:
        """The operation has ended."""
        if self._state is None or not isinstance(self._general, _General):
            raise Exception(constants.ERR_REQUEST, "the request is null or not general")
        self._general.complete = True

    def complete(self, obj: Any = None) -> None:
        """The operation has ended with an object."""
        if isinstance(self._general, _General):
            self._general.value = obj
        self.Complete()
