"""`Exception` with the error classes of MPI.

    RuntimeError
    └── Exception          a class of MPI (ERR_RANK, ERR_TRUNCATE ...) and what was wrong

Faults of the engine (PeerLost, Mismatch ...) stay what they are: their texts name the rank and the call.
"""

from __future__ import annotations

import builtins
import operator
from typing import Any

import numpy as np

from unisono.mpi import constants

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

    error_code, error_class, error_string = map(property, (Get_error_code, Get_error_class, Get_error_string))

    def __str__(self) -> str:
        text = self.Get_error_string()
        return f"{text}: {self._text}" if self._text else text

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ob_mpi})"

    def __int__(self) -> int:
        return self.ob_mpi

    def __bool__(self) -> bool:
        return self.ob_mpi != constants.SUCCESS


def _compared(compare: Any) -> Any:
    return lambda self, other: compare(self.ob_mpi, other.ob_mpi if isinstance(other, Exception) else other)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Exception, f"__{_name}__", _compared(getattr(operator, _name)))
Exception.__hash__ = lambda self: hash(self.ob_mpi)  # type: ignore[method-assign]


def Get_error_class(errorcode: int) -> int:
    """The class of an error code."""
    Get_error_string(errorcode)
    return _classes.get(errorcode, errorcode)


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


def wrong_class(name: str, expected: str, value: object) -> TypeError:
    """The error of an argument that is no object of a class."""
    return TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def whole(value: Any, name: str) -> int:
    """An integer argument; a float counts without its fraction, as for mpi4py.

    Raises:
        TypeError: it is none.
    """
    return int(value) if isinstance(value, (float, np.floating)) else exact(value, name)


def exact(value: Any, name: str) -> int:
    """An integer in a list, an array or a message. No float counts.

    Raises:
        TypeError: it is none.
    """
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(f"{name}: an integer is required, got {type(value).__name__}") from None


def of_size(found: Any, size: int) -> Any:
    """Check the length of an argument.

    Raises:
        ValueError: it is another one.
    """
    if len(found) != size:
        raise ValueError(f"expecting {size} items, got {len(found)}")
    return found


def check_root(root: int, size: int) -> int:
    """Check the number of a root.

    Raises:
        Exception: there is no such rank.
    """
    if type(root) is not int:
        root = whole(root, "root")
    if not 0 <= root < size:
        raise Exception(constants.ERR_ROOT, f"root is {root}, expected 0..{size - 1}")
    return root


Error = builtins.Exception
