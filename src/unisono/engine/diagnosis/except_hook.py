"""Sends an uncaught error to the launcher, which shows the same error of many ranks once.

`install` sets a hook before Python's own. It sends every uncaught error to the launcher, on the socket that
the rank inherited. Only the launcher then shows an error of Unisono. Any other error is also printed here at
once, and so is an error that cannot be sent.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from unisono.engine.diagnosis import launcher_socket
from unisono.engine.diagnosis.report import UncaughtError
from unisono.engine.environment.settings import Settings
from unisono.errors import Aborted, GroupError, PeerLost, RendezvousError, Timeout, UnisonoError

if TYPE_CHECKING:
    from traceback import TracebackException

MOST_NBYTES = 96 << 10
"""The longest record; a longer one is sent without its report and with shortened texts."""

MOST_CHARACTERS = 16 << 10

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


_handed_on: deque[UnisonoError] = deque(maxlen=8)
"""Global, because the hook of the process is: `torch.distributed` puts its own before it, so that
`sys.excepthook` does not lead to ours. A group fails once, and few fail before the process ends.
"""


class _ExceptHook:
    """The hook in `sys.excepthook`."""

    def __init__(self, fd: int, inode: int, rank: int, before: _Hook) -> None:
        self._fd = fd
        self._inode = inode
        self._rank = rank
        self._pid = os.getpid()
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        quiet = handed = False
        with contextlib.suppress(Exception):  # __str__ of the caller's error class may raise
            quiet = isinstance(_meant(error), UnisonoError) and self._before is sys.__excepthook__
            handed = os.getpid() == self._pid and self._send(error, printed=not quiet)
        if not (quiet and handed):
            self._before(kind, error, trace)

    def _send(self, error: BaseException, *, printed: bool) -> bool:
        data = _encoded(uncaught(error, self._rank, printed=printed))
        return launcher_socket.send(self._fd, self._inode, data)


def install(settings: Settings) -> None:
    """Send uncaught errors of this process to its launcher, if the launcher asks for them."""
    if settings.report_fd is None or settings.rank is None or isinstance(sys.excepthook, _ExceptHook):
        return
    sys.excepthook = _ExceptHook(*settings.report_fd, settings.rank, sys.excepthook)


def remember(error: Exception) -> None:
    """Remember an error of ours of which another library, such as PyTorch's C++, keeps only the text."""
    if isinstance(error, UnisonoError):
        _handed_on.append(copy.copy(error))  # without its frames, which hold buffers


def _meant(error: BaseException) -> BaseException:
    """The error of ours whose text a RuntimeError repeats; otherwise the error itself."""
    if type(error) is not RuntimeError:
        return error
    said = str(error)
    return next((each for each in _handed_on if f"{type(each).__name__}: {each}" in said), error)


def uncaught(error: BaseException, rank: int, *, printed: bool) -> UncaughtError:
    """The record of an error that ends this process."""
    from traceback import TracebackException

    summary = TracebackException.from_exception(error)
    message = "".join(summary.format_exception_only())
    all_frames = _before_message(summary, message)
    _hide_own_frames(summary)
    frames = _before_message(summary, message)
    meant = _meant(error)
    if meant is not error:
        all_frames += message
        message = "".join(TracebackException.from_exception(meant).format_exception_only())
    return UncaughtError(
        rank=rank,
        pid=os.getpid(),
        at=time.time(),
        type=f"{type(meant).__module__}.{type(meant).__qualname__}",
        message=message,
        frames=frames,
        all_frames=all_frames,
        lost=_is_consequence(meant),
        printed=printed,
        missing=meant.missing if isinstance(meant, (RendezvousError, Timeout)) else (),
        report=meant.report if isinstance(meant, GroupError) else None,
    )


def _before_message(summary: TracebackException, message: str) -> str:
    return "".join(summary.format()).removesuffix(message)


def _hide_own_frames(summary: TracebackException) -> None:
    """Remove the frames of this package, also in chained errors."""
    from traceback import StackSummary

    left: list[TracebackException | None] = [summary]
    while left:
        each = left.pop()
        if each is None:
            continue
        frames = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
        each.stack = StackSummary.from_list(frames)
        left += [each.__cause__, each.__context__]


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, Aborted):
        return error.report is None or error.report.found_by != error.report.reporter
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (PeerLost, ConnectionError)) or "DistNetworkError" in names


def _encoded(record: UncaughtError) -> bytes:
    data = msgspec.json.encode(record)
    if len(data) <= MOST_NBYTES:
        return data
    shorter = msgspec.structs.replace(
        record,
        message=record.message[:MOST_CHARACTERS],
        frames=record.frames[-MOST_CHARACTERS // 2 :],
        all_frames=record.all_frames[-MOST_CHARACTERS // 2 :],
        report=None,
    )
    return msgspec.json.encode(shorter)
