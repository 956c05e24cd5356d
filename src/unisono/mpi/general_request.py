"""`Grequest`: a request whose operation the program itself performs."""

from __future__ import annotations

import traceback
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Error, Exception
from unisono.mpi.progress import Operation
from unisono.mpi.request import Request
from unisono.mpi.status import Status


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
