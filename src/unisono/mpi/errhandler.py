"""Error handlers: what an error of MPI does with an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.handle import Handle, State
from unisono.mpi.transport import abort


class _Handler(State):
    def __init__(self, name: str, function: Callable[[Any, int], None] | None = None) -> None:
        self.name, self.function = name, function


class Errhandler(Handle):
    """What an error of MPI does: raise (ERRORS_RETURN), end the job, or call a function first."""

    _null = constants.ERR_ERRHANDLER
    Free = Handle._free


ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL = (
    Errhandler._of(_Handler(name)) for name in ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL")
)


class HasErrhandler(Handle):
    """The methods of an object that has an error handler."""

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """An error handler that calls a function with the object and the error code."""
        handler: Errhandler = Errhandler._of(_Handler("", errhandler_fn))
        return handler

    def Get_errhandler(self) -> Errhandler:
        """Its error handler."""
        found = getattr(self._alive(), "handler", None) or ERRORS_RETURN
        return Errhandler(found)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set its error handler."""
        state = self._alive()
        if not errhandler:
            raise Exception(constants.ERR_ARG, "the error handler is null")
        state.handler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Call its error handler."""
        self._alive()
        call(self, errorcode)


def call(owner: Any, errorcode: int) -> None:
    """Do what the error handler of `owner` says; returns if that is nothing."""
    handler = owner.Get_errhandler()._state
    if handler.function is not None:
        handler.function(owner, errorcode)
    elif handler.name != "ERRORS_RETURN":
        abort(errorcode)
