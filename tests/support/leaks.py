"""Finds the leaks of a test: descriptors, threads, child processes, files in /dev/shm.

It reads /proc, so that threads and descriptors of the native module count, too. A snapshot takes a fraction
of a millisecond; the check takes longer only when it suspects a leak.
"""

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

# A leak remains however long the check waits. Threads and processes that are ending, here or in a parallel
# test, may need some time on a busy machine.
GRACE_S = 15.0
# Set in this process's environment, and inherited by child processes: it identifies a grandchild whose parent
# has ended.
MARK = "PYTEST_RUN_PID"

# Descriptors that the import of a module may open and keep.
KEPT_FILES = ("/dev/null", "/dev/urandom", "/dev/random")
KEPT_SUFFIXES = (
    ".so",
    ".py",
    ".pyc",
    ".pth",
    ".zip",
    "/memfd:unisono-arrays (deleted)",
    "/memfd:unisono-stack (deleted)",
)  # the last two: one per process
# multiprocessing's helper, and the ranks of marked tests, which live as long as this process.
KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "unisono.testing.rank")
# Files in /dev/shm that Python's multiprocessing and MPICH name at random: their owner is unknown. Unisono
# makes none there; a test whose ranks do uses a name of its own (see `launching`).
ANYBODYS_FILES = ("psm_", "mpich_shm_")
# PyTorch's own pools (autograd, inter-op), which live as long as the process.
KEPT_THREADS = ("pt_",)


class Snapshot(NamedTuple):
    """The resources of this process at one moment."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[int]
    children: frozenset[int]
    shared: frozenset[str]
    reaped: tuple[float, ...]  # resource usage of ended children: shows whether there were any


def snapshot() -> Snapshot:
    """Take a snapshot of this process."""
    threads = [int(tid) for tid in os.listdir("/proc/self/task")]
    return Snapshot(
        descriptors=frozenset(_descriptors()),
        threads=frozenset(threads),
        children=frozenset(child for tid in threads for child in _children(tid)),
        shared=frozenset(os.listdir("/dev/shm")),
        reaped=tuple(resource.getrusage(resource.RUSAGE_CHILDREN)),
    )


def left_behind(before: Snapshot) -> list[str]:
    """Return the new resources, after a grace period for threads and processes that are ending.

    A leaked child is killed, so that it affects this test only.
    """
    found = _compare(before)
    if found:
        gc.collect()
        deadline = time.monotonic() + GRACE_S
        while (found := _compare(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
    for pid in _processes(before, snapshot()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def mark_descendants() -> None:
    """Mark all descendants of this process, also those whose parent has ended."""
    os.environ[MARK] = str(os.getpid())


def _compare(before: Snapshot) -> list[str]:
    now = snapshot()
    if now == before:
        return []
    return [
        *(
            f"descriptor {fd} -> {to}"
            for fd, to in sorted(now.descriptors - before.descriptors)
            if not _kept(to)
        ),
        *(f"thread {name}" for name in _thread_names(now.threads - before.threads)),
        *(f"process {pid} ({_command(pid)})" for pid in _processes(before, now)),
        *(f"/dev/shm/{name}" for name in sorted(now.shared - before.shared) if not _foreign(name)),
    ]


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return found


def _kept(target: str) -> bool:
    return target in KEPT_FILES or target.endswith(KEPT_SUFFIXES)


def _thread_names(tids: frozenset[int]) -> list[str]:
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    named = ((tid, python.get(tid) or _read(f"/proc/self/task/{tid}/comm")) for tid in sorted(tids))
    return [f"{tid} ({name})" for tid, name in named if name and not name.startswith(KEPT_THREADS)]


def _children(tid: int) -> list[int]:
    return [int(pid) for pid in _read(f"/proc/self/task/{tid}/children").split()]


def _processes(before: Snapshot, now: Snapshot) -> list[int]:
    """Living children and orphaned grandchildren. A Popen that never reaped its child warns by itself."""
    orphans = _marked() if now.reaped != before.reaped else frozenset()
    pids = (now.children | orphans) - before.children
    return [pid for pid in sorted(pids) if not _dead(pid) and not _excused(pid)]


def _marked() -> frozenset[int]:
    """Find every process with this one's mark."""
    mark = f"{MARK}={os.getpid()}\0"
    others = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    return frozenset(pid for pid in others if mark in _read(f"/proc/{pid}/environ"))


def _dead(pid: int) -> bool:
    stat = _read(f"/proc/{pid}/stat")
    return not stat or stat.rpartition(")")[2].split()[0] in "ZX"


def _excused(pid: int) -> bool:
    return any(name in _command(pid) for name in KEPT_CHILDREN)


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:200]


def _foreign(name: str) -> bool:
    """Whether a new file in /dev/shm may not be ours: removed again, another user's, or mapped elsewhere."""
    path = Path("/dev/shm", name)
    if name.startswith(ANYBODYS_FILES):
        return True
    try:
        if path.stat().st_uid != os.geteuid():
            return True
    except FileNotFoundError:
        return True
    mine = str(os.getpid())
    maps = (
        entry / "maps" for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != mine
    )
    return any(f" {path}\n" in _read(str(entry)) for entry in maps)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it ended meanwhile, or is another user's
        return ""
