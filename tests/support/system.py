"""What the system beneath the tests lacks: an emulator does not know every call of Linux.

Each thing is tried once. `pytest.mark.needs("given pages")` skips a test with the reason where it is missing.
"""

import ctypes
import functools
import mmap
import os
from collections.abc import Callable

from unisono import _native


def _reads_other_processes() -> bool:
    return _native.reaches(os.getpid(), _native.access_probe())


def _gives_pages() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        memory[0] = 1
        memory.madvise(mmap.MADV_REMOVE)
        return memory[0] == 0


def _adopts_orphans() -> bool:
    get_child_subreaper = 37
    return ctypes.CDLL(None).prctl(get_child_subreaper, ctypes.byref(ctypes.c_int()), 0, 0, 0) == 0


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "other processes": (_reads_other_processes, "process_vm_readv is not there: ranks copy twice"),
    "orphans": (_adopts_orphans, "PR_SET_CHILD_SUBREAPER is not there: orphans go to init"),
    "given pages": (_gives_pages, "madvise does nothing: pages are neither allocated nor freed when asked"),
}


@functools.cache
def why_not(need: str) -> str:
    """The reason why this system has not what a test needs; empty when it has."""
    has, reason = NEEDS[need]
    return "" if has() else f"{reason} (an emulator?)"
