"""Explains limits of the process or the machine that make a call fail: which limit, and how to raise it.

It is the one place that explains errors of the system. It needs no resources itself: there may be none left.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import math
import os
import resource
import select
from collections.abc import Iterator

from unisono.errors import UnisonoError, message

COROUTINE_PACKAGES = ("gevent", "eventlet")

_SPACE = (errno.ENOSPC, errno.EDQUOT)
_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EFBIG, *_SPACE)


def replaced_threads() -> str:
    """The package whose coroutines stand in the place of Python's threads, "gevent" or "eventlet"; "": none.

    A debugger, too, replaces the function that starts threads, by one that starts real ones.
    """
    package = str(getattr(_thread.start_new_thread, "__module__", "")).partition(".")[0]
    return package if package in COROUTINE_PACKAGES else ""


def refuse_replaced_modules() -> None:
    """Raises RuntimeError: eventlet's monkey patch is on; ranks would wait for each other for ever."""
    package = replaced_threads()
    if package == "eventlet" or not hasattr(select, "poll"):
        raise RuntimeError(
            message(
                "ranks cannot meet without Python's own threads and select.poll",
                observed=f"{package or 'a package'} has replaced them",
                remedy="Use eventlet.monkey_patch(thread=False, select=False).",
            )
        )


def usable_cores() -> int:
    """Cores that this process may use, by its affinity mask and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as limit:
            quota, period = limit.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))


@contextlib.contextmanager
def limit_errors(kind: type[UnisonoError], doing: str, descriptors: str = "") -> Iterator[None]:
    """Raise an error of this block that is due to a limit as `kind`. Other arguments: see `limit_text`."""
    try:
        yield
    except UnisonoError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_limit(error):
            raise
        raise kind(f"{doing}: {limit_text(error, descriptors)}") from error


def limit_error(error: OSError) -> Exception:
    """What a call of a group raises for an error of the system: a UnisonoError if a limit is the cause."""
    if not is_limit(error):
        return error
    named = UnisonoError(f"the call cannot begin: {limit_text(error)}")
    named.__cause__ = error
    return named


def is_limit(error: BaseException | None) -> bool:
    """Whether an error says that a resource of the process or the machine is exhausted."""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return isinstance(error, MemoryError) or _is_no_thread(error)


def limit_text(error: BaseException, descriptors: str = "") -> str:
    """The text of an error; for a limit, which one it is and how to raise it.

    Args:
        descriptors: how many descriptors are needed here, as text.
    Example: OSError(EMFILE) -> "too many open files (the limit RLIMIT_NOFILE is 1024; a group of 64 ranks
    takes up to 208). Raise it before the start: `ulimit -n 4096`, or in the program by resource.setrlimit."
    """
    if not is_limit(error):
        return f"{type(error).__name__}: {error}".rstrip(": ")
    what, limit, remedy = _limit_of(error)
    if descriptors and isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit += f"; {descriptors}"
    return f"{what} ({limit}). {remedy}" if limit else f"{what}. {remedy}"


def _limit_of(error: BaseException) -> tuple[str, str, str]:
    """The exhausted resource, its limit, and how to raise that."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return "too many open files", _shown("RLIMIT_NOFILE"), _raise("RLIMIT_NOFILE", "n")
    if number == errno.ENFILE:
        return "too many open files on this machine", "fs.file-max", "Raise it: `sysctl fs.file-max=...`."
    if number == errno.EFBIG:
        return "the file may not grow so large", _shown("RLIMIT_FSIZE"), _raise("RLIMIT_FSIZE", "f", 1024)
    if number in _SPACE:
        text = _own_text(error)
        return text, "", "Free some space there, or choose a place on another file system."
    if _is_no_thread(error):
        shown = f"{_shown('RLIMIT_NPROC')}, {_shown('RLIMIT_AS')}"
        remedy = "Raise them (`ulimit -u`, `ulimit -v`), or the container's limit of processes (pids.max)."
        return "no more threads can be started", shown, remedy
    return _own_text(error) or "out of memory", _shown("RLIMIT_AS"), _more_memory()


def _more_memory() -> str:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return _raise("RLIMIT_AS", "v", 1024)
    return "Use a machine or a container (memory.max of its cgroup) with more memory, or fewer ranks on it."


def _own_text(error: BaseException) -> str:
    if isinstance(error, OSError):
        path = f": {error.filename!r}" if error.filename else ""
        return f"{(error.strerror or str(error)).lower()}{path}"
    return "out of memory" if str(error) in ("", "std::bad_alloc") else f"out of memory: {error}"


def _is_no_thread(error: BaseException | None) -> bool:
    """Whether Python or C++ raised it because a thread could not be started."""
    if isinstance(error, BlockingIOError):  # from std::thread: no other call of ours raises it
        return "temporarily" in str(error)
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


def _shown(name: str) -> str:
    soft, _ = resource.getrlimit(getattr(resource, name))
    return f"the limit {name} is {soft}" if soft != resource.RLIM_INFINITY else f"{name} is unlimited"


def _raise(name: str, letter: str, unit: int = 1) -> str:
    """How to raise a limit of the process. unit: the shell's unit of it."""
    soft, hard = resource.getrlimit(getattr(resource, name))
    if hard != resource.RLIM_INFINITY and soft >= hard:
        return (
            "The administrator raises it (/etc/security/limits.conf, `docker run --ulimit`, "
            f"Limit{name[7:]}= of a service)."
        )
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard // unit)
    return f"Raise it before the start: `ulimit -{letter} {most}`, or in the program by resource.setrlimit."
