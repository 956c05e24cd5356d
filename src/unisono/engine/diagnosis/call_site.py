"""Where in the caller's source an operation was called, and where a late rank is."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys

from unisono import _native

_OURS = ("unisono.", "torch.")

_makers: dict[int, object] = {}
"""Who makes the memory file of a process, by its pid: a forked child makes one of its own."""


def publish_stack() -> None:
    """Let ranks that wait in vain for this process learn at which line it is.

    csrc/protocol/stack_sample.cpp asks. At SIGURG, which the system otherwise ignores, faulthandler writes the stack into a memory file. A program
    that handles or ignores this signal keeps it; then the line stays unknown.
    """
    if signal.getsignal(signal.SIGURG) != signal.SIG_DFL:
        return
    me = object()
    if _makers.setdefault(os.getpid(), me) is not me:
        return
    with contextlib.suppress(OSError):
        file = os.memfd_create("unisono-stack")
        faulthandler.register(signal.SIGURG, file=file, all_threads=False)
        _native.set_stack_file(file, _library_folders())


def _library_folders() -> list[str]:
    """Unisono's, PyTorch's, and that of Python's own library."""
    found = [importlib.util.find_spec(name) for name in ("unisono", "torch")]
    packages = [folder for spec in found if spec for folder in spec.submodule_search_locations or ()]
    folders = *packages, os.path.dirname(os.__file__)
    return [
        f"{folder}/".encode("ascii", "backslashreplace").decode() for folder in folders
    ]  # as faulthandler


def call_site() -> str:
    """File and line of the innermost frame that is neither Unisono's nor PyTorch's; "" when there is none.

    Example: "train.py:41"
    """
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_OURS):
        outer = frame.f_back
        if outer is None:
            return ""
        frame = outer
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
