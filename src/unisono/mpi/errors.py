"""`Exception` with the error classes of MPI, and error handlers.

    RuntimeError
    └── Exception          a class of MPI (ERR_RANK, ERR_TRUNCATE ...) and what was wrong

Faults of the engine (PeerLost, Mismatch ...) stay what they are: their texts name the rank and the call.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from unisono.mpi import constants
from unisono.mpi.ending import abort
from unisono.mpi.handle import Handle, State

_TEXTS = {number: f"MPI_{name}" for name, number in vars(constants).items() if name.startswith("ERR_")}
_TEXTS[constants.SUCCESS] = "MPI_SUCCESS: no errors"
_classes: dict[int, int] = {}
"""The class of each code that `Add_error_code` has made; of a class itself."""


def last_code() -> int:
    """The largest error code or class in use."""
    return max(_classes, default=constants.ERR_LASTCODE)


class Exception(RuntimeError):
    """An error of MPI. `Exception(ERR_RANK)`; it is also an int: its error code."""

    def __init__(self, ierr: int = constants.SUCCESS, text: str = "") -> None:
        super().__init__(ierr)
        self.ob_mpi = int(ierr) if ierr >= constants.SUCCESS else constants.ERR_UNKNOWN
        self._text = text

    def Get_error_code(self) -> int:
        """Its error code."""
        return self.ob_mpi

    def Get_error_class(self) -> int:
        """The class of its error code."""
        return Get_error_class(self.ob_mpi)

    def Get_error_string(self) -> str:
        """The text of its error code."""
        return Get_error_string(self.ob_mpi)

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)

    def __str__(self) -> str:
        text = self.Get_error_string()
        return f"{text}: {self._text}" if self._text else text

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ob_mpi})"

    def __int__(self) -> int:
        return self.ob_mpi

    def __bool__(self) -> bool:
        return self.ob_mpi != constants.SUCCESS

    def __hash__(self) -> int:
        return hash(self.ob_mpi)

    def __eq__(self, other: object) -> bool:
        return self.ob_mpi == other

    def __ne__(self, other: object) -> bool:
        return self.ob_mpi != other

    def __lt__(self, other: Any) -> bool:
        return self.ob_mpi < int(other)

    def __le__(self, other: Any) -> bool:
        return self.ob_mpi <= int(other)

    def __gt__(self, other: Any) -> bool:
        return self.ob_mpi > int(other)

    def __ge__(self, other: Any) -> bool:
        return self.ob_mpi >= int(other)


def Get_error_class(errorcode: int) -> int:
    """The class of an error code."""
    if errorcode in _TEXTS:
        return _classes.get(errorcode, errorcode)
    raise Exception(constants.ERR_ARG, f"there is no error code {errorcode}")


def Get_error_string(errorcode: int) -> str:
    """The text of an error code."""
    if errorcode not in _TEXTS:
        raise Exception(constants.ERR_ARG, f"there is no error code {errorcode}")
    return _TEXTS[errorcode]


def Add_error_class() -> int:
    """A new error class."""
    code = last_code() + 1
    _classes[code], _TEXTS[code] = code, ""
    return code


def Add_error_code(errorclass: int) -> int:
    """A new error code in a class."""
    code = last_code() + 1
    _classes[code], _TEXTS[code] = Get_error_class(errorclass), ""
    return code


def Add_error_string(errorcode: int, string: str) -> None:
    """Set the text of a code or class that the program has added."""
    if errorcode not in _classes:
        raise Exception(constants.ERR_ARG, f"the program has added no error code {errorcode}")
    _TEXTS[errorcode] = str(string)


def Remove_error_class(errorclass: int) -> None:
    """Remove a class that the program has added."""
    used = any(kind == errorclass and code != errorclass for code, kind in _classes.items())
    _remove(errorclass, _classes.get(errorclass) == errorclass and not used)


def Remove_error_code(errorcode: int) -> None:
    """Remove a code that the program has added."""
    _remove(errorcode, _classes.get(errorcode, errorcode) != errorcode)


def Remove_error_string(errorcode: int) -> None:
    """Remove the text of a code that the program has added."""
    Add_error_string(errorcode, "")


def _remove(code: int, found: bool) -> None:
    if not found or _TEXTS[code]:
        raise Exception(constants.ERR_ARG, f"the program has added no error {code}, or it is in use")
    del _classes[code], _TEXTS[code]


class _Handler(State):
    def __init__(self, name: str, function: Callable[[Any, int], None] | None = None) -> None:
        self.name, self.function = name, function


class Errhandler(Handle):
    """What an error of MPI does: raise (ERRORS_RETURN), end the job, or call a function first."""

    def Free(self) -> None:
        """Release it."""
        if self._state is None:
            raise Exception(constants.ERR_ERRHANDLER, "the error handler is null")
        self._state = None


ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL = (
    Errhandler._of(_Handler(name)) for name in ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL")
)


class HasErrhandler:
    """The methods of an object that has an error handler."""

    _state: Any
    _null = constants.ERR_ARG
    """The error class of the null handle."""

    def _alive(self) -> Any:
        if self._state is None:
            raise Exception(self._null, f"this {type(self).__name__} is null")
        return self._state

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """An error handler that calls a function with the object and the error code."""
        if not callable(errhandler_fn):
            raise TypeError("errhandler_fn: expected a callable")
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


def whole(value: Any, name: str) -> int:
    """An integer argument.

    Raises:
        TypeError: it is none.
    """
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(f"{name}: an integer is required, got {type(value).__name__}") from None


Error = builtins.Exception
