"""The memory file into which Python writes the stack of a late rank. ADR 22 says why."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal

from unisono import _native

_makers: dict[int, object] = {}
"""Who makes the memory file of a process, by its pid: a forked child makes one of its own."""


def publish_stack() -> None:
    """Let ranks that wait in vain for this process ask at which line it is.

    At SIGURG, which the system otherwise ignores, faulthandler writes the stack into a memory file; the
    engine asks and reads it (csrc/protocol/stack_sample.cpp). A program that handles or ignores SIGURG keeps
    it so, and its lines stay unknown.
    """
    if signal.getsignal(signal.SIGURG) != signal.SIG_DFL:
        return
    me = object()
    if _makers.setdefault(os.getpid(), me) is not me:
        return
    with contextlib.suppress(OSError, ImportError, ValueError):
        folders = _library_folders()
        file = os.memfd_create("unisono-stack")
        faulthandler.register(signal.SIGURG, file=file, all_threads=False)
        _native.set_stack_file(file, folders)


def _library_folders() -> list[str]:
    """Unisono's, PyTorch's, and that of Python's own library, as faulthandler writes them."""
    found = [importlib.util.find_spec(name) for name in ("unisono", "torch")]
    packages = [folder for spec in found if spec for folder in spec.submodule_search_locations or ()]
    folders = *packages, os.path.dirname(os.__file__)
    return [f"{folder}/".encode("ascii", "backslashreplace").decode() for folder in folders]
