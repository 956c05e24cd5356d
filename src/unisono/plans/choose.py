"""Which algorithm for which operation and size."""

from __future__ import annotations

__all__ = ["choose"]

ONE_SHOT_BYTES = 16 * 1024
"""Work that every rank may do for all: up to here it costs less than a second round of waiting."""


def choose(collective: str, size: int, nbytes: int) -> str:
    """The algorithm for `nbytes` per rank among `size` ranks of one host."""
    if collective == "all_reduce":
        return "one_shot" if nbytes * (size - 1) <= ONE_SHOT_BYTES else "two_shot"
    return "dissemination" if collective == "barrier" else "direct"
