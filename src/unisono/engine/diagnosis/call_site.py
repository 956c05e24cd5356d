"""Where in the caller's source an operation was called."""

from __future__ import annotations

import sys

_OURS = ("unisono.", "torch.", "contextlib")


def call_site() -> str:
    """File and line of the innermost frame of the caller; "" when there is none.

    Example: "train.py:41"
    """
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_OURS):
        outer = frame.f_back
        if outer is None:
            return ""
        frame = outer
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
