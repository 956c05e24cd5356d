"""Times, rates and sizes as people write them: "5 us", "100 Gbit/s", "64 KiB"."""

from __future__ import annotations

import math
import re

__all__ = [
    "bytes_per_s",
    "nbytes",
    "readable_size",
    "readable_time",
    "seconds",
    "seconds_per_byte",
    "signed_time",
    "written_rate",
    "written_time",
]

_TIMES = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9, "ps": 1e12}  # in a second
_PREFIXES = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_NUMBER = r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*"
_TIME = re.compile(_NUMBER + "(s|ms|us|µs|ns|ps)")
_RATE = re.compile(_NUMBER + "(|[kKMGT]i?)(B|bit|b)(?:/s|ps)")
_SIZE = re.compile(_NUMBER + "(|[kKMGT]i?)(B|)")


def seconds(value: object) -> float:
    """A time in seconds, from a number of seconds or a text. Example: seconds("5 us") == 5e-6.

    Raises:
        ValueError: it is no time, below 0, or not finite.
    """
    if isinstance(value, str):
        found = _TIME.fullmatch(value)
        if not found:
            raise ValueError(f"{value!r} is no time, expected such as '5 us'")
        return _finite(float(found[1]) / _TIMES[found[2]], value)
    return _number(value, "time in seconds, or a text such as '5 us'")


def bytes_per_s(value: object) -> float:
    """A rate in bytes per second, from a number or a text. Example: bytes_per_s("100 Gbit/s") == 12.5e9.

    Raises:
        ValueError: it is no rate, not above 0, or not finite.
    """
    if isinstance(value, str):
        found = _RATE.fullmatch(value)
        if not found:
            raise ValueError(f"{value!r} is no rate, expected such as '100 Gbit/s' or '50 GB/s'")
        rate = _finite(float(found[1]), value) * _PREFIXES[found[2]] / (1 if found[3] == "B" else 8)
    else:
        rate = _number(value, "rate in bytes per second, or a text such as '50 GB/s'")
    if rate <= 0:
        raise ValueError(f"the rate is {value!r}, expected one above 0")
    return _finite(rate, value)


def seconds_per_byte(value: object) -> float:
    """The time of a byte, from a rate as `bytes_per_s` reads it. Example: seconds_per_byte("2 B/s") == 0.5.

    Raises:
        ValueError: it is no rate, not above 0, or not finite.
    """
    return _finite(1 / bytes_per_s(value), value)


def nbytes(value: object) -> int:
    """A number of bytes, from a number or a text. Example: nbytes("64 KiB") == 65536; nbytes("64K") == 64000.

    Raises:
        ValueError: it is no size, or not whole.
    """
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if not found:
            raise ValueError(f"{value!r} is no size, expected such as '64 KiB'")
        size = _finite(float(found[1]) * _PREFIXES[found[2]], value)
    else:
        size = _number(value, "number of bytes, or a text such as '64 KiB'")
    if size != int(size) or size >= 1 << 62:
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def written_time(value: float) -> str:
    """A time as a text that `seconds` reads back. Example: written_time(5e-6) == "5 us"."""
    for unit in ("s", "ms", "us", "ns"):
        if value * _TIMES[unit] >= 1:
            return f"{value * _TIMES[unit]:.6g} {unit}"
    return f"{value * 1e9:.6g} ns"


def written_rate(value: float) -> str:
    """A rate as a text that `bytes_per_s` reads back. Example: written_rate(12.5e9) == "12.5 GB/s"."""
    for prefix in ("T", "G", "M", "k"):
        if value >= _PREFIXES[prefix]:
            return f"{value / _PREFIXES[prefix]:.6g} {prefix}B/s"
    return f"{value:.6g} B/s"


def _number(value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is a {type(value).__name__}, expected a {expected}")
    try:
        return _finite(float(value), value)
    except OverflowError:
        raise ValueError(f"{value!r} is too large") from None


def _finite(number: float, value: object) -> float:
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a finite number of at least 0")
    return number


# ---- as people read them ----

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def readable_time(seconds: float) -> str:
    """Example: 0.0124 -> "12.4 ms"; 0.00135 -> "1.35 ms"."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
    return f"{1e6 * seconds:.1f} us"


def signed_time(seconds: float) -> str:
    """Example: 0.0124 -> "+12.4 ms"."""
    return ("-" if seconds < 0 else "+") + readable_time(abs(seconds))


def readable_size(nbytes: float) -> str:
    """Example: 1536 -> "1.5 KiB"; 3 << 30 -> "3.00 GiB"."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    if nbytes >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / KIB:.1f} KiB" if nbytes >= KIB else f"{nbytes:.0f} B"
