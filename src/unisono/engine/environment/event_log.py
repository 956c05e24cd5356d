"""The log of a process: what its groups are made of, how each kind of call runs, and what changes.

It is off unless the environment or `unisono.log` asks for it: `LOG.level` is 0, and nothing else is read.
It writes whole lines through Python's `logging`, as the logger "unisono", to standard error or a file:

    node7:4121 rank 3 unisono INFO init: group world: 4 ranks on 2 hosts ...
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unisono.engine.base.validation import instance, text
from unisono.engine.environment.env import LOG_LEVELS, LOG_SUBSYSTEMS

if TYPE_CHECKING:
    import logging

    from unisono.engine.environment.settings import Settings

__all__ = ["LOG", "log"]


class EventLog:
    """What is logged in this process, and where to.

    Attributes:
        level: 0: nothing; 1: groups, each kind of call once, changes; 2: also each peer and each new call.
        introduced: the versions and settings of this process were written.
    """

    def __init__(self) -> None:
        self.level = 0
        self.introduced = False
        self._subsystems = frozenset(LOG_SUBSYSTEMS)
        self._given = False  # by the program, not by the environment
        self._who = ""
        self._handler: logging.Handler | None = None
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()  # a signal may raise the level while this thread sets it

    def configure(self, settings: Settings) -> None:
        """Log as the environment asks, unless the program has called `log`."""
        rank = _rank_of(settings)
        self._who = f"{os.uname().nodename}:{os.getpid()}" + ("" if rank is None else f" rank {rank}")
        if settings.log_signal:
            self._listen(settings.log_signal)
        if not self._given:
            self.set(settings.log, settings.log_file, settings.log_subsystems)

    def set(self, level: str, file: str = "", subsystems: Iterable[str] = LOG_SUBSYSTEMS) -> None:
        """See `log`."""
        with self._lock:
            self._subsystems = frozenset(subsystems)
            if level != "off":
                self._open(file)
            self.level = LOG_LEVELS.index(level)
            groups = list(self._groups)
        for group in groups:  # what was called before is a new kind of call for the log
            if not group.closed:
                group._forget(group.timeout_s)

    def add_group(self, group: Any) -> None:
        """A group whose remembered calls are planned again when the level rises."""
        with self._lock:
            self._groups.add(group)

    def info(self, subsystem: str, line: str) -> None:
        """Write a line, from level 1 on."""
        self._write(1, subsystem, line)

    def debug(self, subsystem: str, line: str) -> None:
        """Write a line at level 2."""
        self._write(2, subsystem, line)

    def _write(self, level: int, subsystem: str, line: str) -> None:
        if self.level >= level and subsystem in self._subsystems and self._handler is not None:
            import logging

            number = logging.INFO if level == 1 else logging.DEBUG
            logging.getLogger("unisono").log(number, "%s: %s", subsystem, line)

    def _open(self, file: str) -> None:
        import logging

        logger = logging.getLogger("unisono")
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler.close()
        name = file.replace("%r", self._who.rpartition("rank ")[2] if "rank " in self._who else "0")
        name = name.replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
        self._handler = logging.FileHandler(name, delay=True) if name else logging.StreamHandler(sys.stderr)
        who = (self._who or f"{os.uname().nodename}:{os.getpid()}").replace("%", "%%")
        self._handler.setFormatter(logging.Formatter(f"{who} unisono %(levelname)s %(message)s"))
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    def _listen(self, name: str) -> None:
        """Each signal of this name raises the level, after the last one to nothing."""
        number = signal.Signals[f"SIG{name}"]
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) not in (
            signal.SIG_DFL,
            signal.SIG_IGN,
        ):
            return  # it has another meaning in this program
        signal.signal(number, lambda *_: self.set(LOG_LEVELS[(self.level + 1) % len(LOG_LEVELS)]))


def _rank_of(settings: Settings) -> int | None:
    """The rank that a launcher has given; None also where another program's variable is no rank."""
    try:
        rank: int | None = settings.rank
    except ValueError:
        return None
    return rank


LOG = EventLog()


def log(level: str, file: str = "", subsystems: Iterable[str] | None = None) -> None:
    """Log what this process's groups do from now on; other ranks are not asked.

    Args:
        level: "off"; "info": versions, groups, transports, each kind of call once with its algorithm, the
            reason and the predicted time, and changes of the membership; "debug": also each new call.
        file: where to, with %r for the rank, %h for the host and %p for the process; "": standard error.
        subsystems: of "init", "env", "net", "coll", "elastic"; None: all.
    Raises:
        ValueError: an argument is none of these.  TypeError: it has another type.
    """
    if instance(level, str, "level") not in LOG_LEVELS:
        raise ValueError(f"level is {level!r}, expected one of {', '.join(LOG_LEVELS)}")
    wanted = list(LOG_SUBSYSTEMS if subsystems is None else subsystems)
    if unknown := [name for name in wanted if name not in LOG_SUBSYSTEMS]:
        raise ValueError(f"subsystems has {unknown[0]!r}, expected some of {', '.join(LOG_SUBSYSTEMS)}")
    LOG._given = True
    LOG.set(level, text(file, "file") if file else "", wanted)
