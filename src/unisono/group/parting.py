"""Why a rank leaves its group, in words for the others. Sends nothing."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["why"]

MOST_BYTES = 200
"""So much is told of an exception: less than a remark holds."""


def why(error: BaseException | None) -> str:
    """The type and the first line of the exception that makes this rank leave; "" when it leaves of itself.

    Args:
        error: the exception under way; None: the one that ended the program, if one did.
    Example: ValueError("bad loss") -> "ValueError: bad loss"
    """
    error = error or _uncaught()
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and not error.code:
        return ""
    said = ""
    with contextlib.suppress(Exception):  # its own __str__
        said = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MOST_BYTES:
        return encoded.decode()
    return encoded[:MOST_BYTES].decode("utf-8", "ignore") + "..."


def _uncaught() -> BaseException | None:
    """What has ended the program. An interactive one goes on after it, and ends for other reasons."""
    if hasattr(sys, "ps1"):
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
