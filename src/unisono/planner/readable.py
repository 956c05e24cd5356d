"""Seconds and bytes as people read them, with a unit that suits their size."""

from __future__ import annotations

__all__ = ["readable_size", "readable_time", "signed_time"]

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
