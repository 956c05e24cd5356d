"""Checks of plain arguments: whole numbers, flags, texts. `buffers` checks arrays."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

LARGEST = (1 << 63) - 1
"""Of a count whose caller gives no other limit: C++ and `struct` hold no larger one."""


def whole(value: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """A whole number as an int; NumPy integers are accepted.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least`, or more than `most` (with `least` alone: than 64 bits hold).
    """
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number") from None
    if least is not None and most is None:
        most = LARGEST
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} is {number}, expected {'' if least is None else least}..{most}")
    return number


def positive(value: Any, name: str) -> float:
    """A finite number above 0; NumPy numbers are accepted.

    Raises:
        TypeError: it is no number.  ValueError: it is not above 0, or not finite.
    """
    number = _number(value, name)
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} is {number}, expected a finite number above 0")
    return number


def not_negative(value: Any, name: str) -> float:
    """A finite number from 0 on; NumPy numbers are accepted.

    Raises:
        TypeError: it is no number.  ValueError: it is below 0, or not finite.
    """
    number = _number(value, name)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} is {number}, expected a finite number from 0 on")
    return number


def _number(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) and not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is no number: {error}") from None


def flag(value: Any, name: str) -> bool:
    """True or False; NumPy's bool is accepted."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} is a {type(value).__name__}, expected True or False")


def text(value: Any, name: str) -> str:
    """A str that can be encoded as UTF-8."""
    given: str = instance(value, str, name)
    given.encode()
    return given


def instance(value: Any, kind: Any, name: str) -> Any:
    """The value, if it is an instance of `kind`.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(each.__name__ for each in kinds)
    raise TypeError(f"{name} is a {type(value).__name__}, expected {expected}")


def one_of(value: Any, name: str, known: Iterable[Any]) -> Any:
    """Check that an argument is one of those that are known."""
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}")
    return value


def listed(values: Iterable[Any], name: str, most: int | None = None) -> list[Any]:
    """The items of an iterable, as a list.

    Raises:
        TypeError: it is not iterable, such as a memoryview of several dimensions.
        ValueError: it has more than `most` items.
    """
    found: list[Any] = []
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} is a {type(values).__name__}, expected a list")
    try:
        for value in values:  # list() would allocate for the announced length
            found.append(value)
            if most is not None and len(found) > most:
                raise ValueError(f"{name}: there are more than {most}")
        return found
    except NotImplementedError as error:
        raise TypeError(f"{name} is a {type(values).__name__}, expected a list: {error}") from None
