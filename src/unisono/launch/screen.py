"""The console: lines of many ranks, each whole and behind its prefix, never two within one line.

Bytes all the way: output need not be text.
"""

from __future__ import annotations

import collections
import os
import select
import threading
from collections.abc import Callable

__all__ = ["BACKLOG_LOW_NBYTES", "Screen", "prefix_of"]

BACKLOG_LOW_NBYTES = 1 << 20  # `on_progress` is called when the backlog falls to this, and at 0

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def prefix_of(rank: int, color: bool) -> bytes:
    """Return what stands before each line of a rank. prefix_of(2, False) -> b"[rank 2] "."""
    text = f"[rank {rank}]"
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m ".encode() if color else f"{text} ".encode()


class _Writer(threading.Thread):
    """The only one who writes to the console, in a thread of its own: a console may block for
    hours (a pager, Ctrl-S), and meanwhile ranks must be reaped and signals answered."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        super().__init__(name="unisono-console", daemon=True)
        self.backlog_nbytes = 0
        self.broken = False
        self._failed: set[int] = set()
        self._on_progress = on_progress
        self._queue: collections.deque[tuple[int, bytes]] = collections.deque()
        self._ready = threading.Condition()

    def put(self, fd: int, data: bytes) -> None:
        with self._ready:
            self._queue.append((fd, data))
            self.backlog_nbytes += len(data)
            self._ready.notify()

    def run(self) -> None:
        while True:
            with self._ready:
                while not self._queue:
                    self._ready.wait()
                fd, data = self._queue.popleft()
            self._write(fd, data)
            with self._ready:
                before, self.backlog_nbytes = self.backlog_nbytes, self.backlog_nbytes - len(data)
            if self.backlog_nbytes == 0 or self.backlog_nbytes <= BACKLOG_LOW_NBYTES < before:
                self._on_progress()

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # somebody made the shared descriptor non-blocking
                select.select([], [fd], [])
            except BrokenPipeError:
                self.broken = True
                return
            except OSError as error:  # the disk is full, or the terminal is gone
                if fd not in self._failed:
                    self._failed.add(fd)
                    self.put(2, f"unisono run: output is lost: {error.strerror}\n".encode())
                return


class Screen:
    """The console as the user sees it: lines of many ranks, each whole and with its prefix.

    `show` takes complete lines, or an unfinished one: that stays open and its owner may continue it;
    when another stream writes first, the open line is ended with a newline.
    """

    def __init__(self, *, color: bool, on_progress: Callable[[], None]) -> None:
        self._writer = _Writer(on_progress)
        self._open: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._device = {fd: _device(fd) for fd in (1, 2)}
        self.is_terminal = {fd: _is_terminal(fd) for fd in (1, 2)}
        self.color = color and self.is_terminal[1] and self.is_terminal[2]

    def start(self) -> None:
        """Begin to write; until then everything is kept."""
        self._writer.start()

    def show(self, fd: int, prefix: bytes, data: bytes) -> None:
        """Write `data` of one stream; every line in it gets the prefix."""
        device = self._device[fd]
        owner = self._open.pop(device, None)
        head = b"" if owner == (fd, prefix) else (b"\n" if owner else b"") + prefix
        if self.is_terminal[fd]:  # a progress bar goes back to the start of its line: keep its name there
            data = data.replace(b"\r", b"\r" + prefix)
        if data.endswith(b"\n"):
            body = data[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        else:
            body = data.replace(b"\n", b"\n" + prefix)
            self._open[device] = (fd, prefix)
        self._writer.put(fd, head + body)

    def say(self, text: str) -> None:
        """Write lines of the launcher itself to stderr."""
        ended = b"\n" if self._open.pop(self._device[2], None) else b""
        self._writer.put(2, ended + text.encode(errors="replace") + b"\n")

    def end_open_lines(self) -> None:
        """Give every unfinished line its newline; the shell's prompt follows."""
        for fd, _ in list(self._open.values()):
            self._writer.put(fd, b"\n")
        self._open.clear()

    @property
    def backlog_nbytes(self) -> int:
        """Bytes accepted and not yet written."""
        return self._writer.backlog_nbytes

    @property
    def broken(self) -> bool:
        """True when the reader of our output went away (`| head`)."""
        return self._writer.broken


def _device(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:
        return (-1, fd)
    return (status.st_rdev, -1) if os.isatty(fd) else (status.st_dev, status.st_ino)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
