"""Timeouts: the one place that checks them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import SupportsFloat

LONGEST_S = 2_000_000.0
"""23 days; a longer timeout is cut to this one. poll() has 31 bits of milliseconds: up to 24.8 days."""


def seconds(timeout: SupportsFloat | timedelta, *, name: str = "timeout", or_none: bool = False) -> float:
    """A timeout in seconds, at most `LONGEST_S`.

    Args:
        name: of the argument, for errors.
        or_none: 0 is allowed: do not wait.
    Raises:
        TypeError: it is no number and no timedelta.  ValueError: it is not positive, or not a number (NaN).
    Example: seconds(timedelta(minutes=1)) -> 60.0, seconds(math.inf) -> 2000000.0
    """
    value = _as_float(timeout, name)
    if not (value > 0 or (or_none and value == 0)):
        expected = "0 or a positive number" if or_none else "a positive number"
        raise ValueError(f"{name} is {value} s, expected {expected} of seconds")
    return min(value, LONGEST_S)


def _as_float(timeout: SupportsFloat | timedelta, name: str) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (bool, str, bytes)) or not hasattr(timeout, "__float__"):
        raise TypeError(f"{name} is {timeout!r}, expected a number of seconds or a timedelta")
    try:
        return float(timeout)
    except OverflowError:  # of an int
        return math.copysign(math.inf, 1 if timeout > 0 else -1)  # type: ignore[operator]
