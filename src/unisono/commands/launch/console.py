"""Copies output from the ranks' pipes to the console and to log files. It loses nothing and starves no rank.

A log file gets exactly the bytes that the rank wrote. The console gets the lines of all ranks, each whole and
with its prefix; lines are never mixed. All data are bytes: output need not be text.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from unisono.commands.launch.job import STDERR, STDOUT, Job

BACKLOG_LOW_NBYTES = 1 << 20  # `on_progress` is called when the backlog falls to this, and at 0

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def prefix_of(rank: int, color: bool) -> bytes:
    """Return the prefix of each line of a rank. prefix_of(2, False) -> b"[rank 2] "."""
    text = f"[rank {rank}]"
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m ".encode() if color else f"{text} ".encode()


class _ConsoleWriter(threading.Thread):
    """The thread that writes to the console. No other thread does: a console may block for hours (a pager,
    Ctrl-S), and meanwhile the launcher must reap ranks and handle signals."""

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
            except BlockingIOError:  # another process made the shared descriptor non-blocking
                select.select([], [fd], [])
            except BrokenPipeError:
                self.broken = True
                return
            except OSError as error:  # the disk is full, or the terminal is gone
                if fd not in self._failed:
                    self._failed.add(fd)
                    self.put(2, f"unisono run: output is lost: {error.strerror}\n".encode())
                return


class Console:
    """The console: lines of many ranks, each whole and with its prefix.

    `show` takes complete lines, or an unfinished one. An unfinished line stays open, and its stream may
    continue it. If another stream writes first, a newline ends the open line.
    """

    def __init__(self, *, color: bool, on_progress: Callable[[], None]) -> None:
        self._writer = _ConsoleWriter(on_progress)
        self._open: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._device = {fd: _device(fd) for fd in (1, 2)}
        self.is_terminal = {fd: _is_terminal(fd) for fd in (1, 2)}
        self.color = color and self.is_terminal[1] and self.is_terminal[2]

    def start(self) -> None:
        """Begin to write; until then all output is buffered."""
        self._writer.start()

    def show(self, fd: int, prefix: bytes, data: bytes) -> None:
        """Write `data` of one stream; every line in it gets the prefix."""
        device = self._device[fd]
        owner = self._open.pop(device, None)
        head = b"" if owner == (fd, prefix) else (b"\n" if owner else b"") + prefix
        if self.is_terminal[fd]:  # a progress bar returns to the start of its line: repeat the prefix there
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
        """End every unfinished line with a newline, before the shell's prompt."""
        for fd, _ in list(self._open.values()):
            self._writer.put(fd, b"\n")
        self._open.clear()

    @property
    def backlog_nbytes(self) -> int:
        """Bytes accepted and not yet written."""
        return self._writer.backlog_nbytes

    @property
    def broken(self) -> bool:
        """True when the reader of the output has ended (`| head`)."""
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


LONGEST_LINE_NBYTES = 8 << 20  # a longer line is shown in pieces
PARTIAL_AGE_S = 0.3  # on a terminal, an unfinished line (a prompt, a progress bar) is shown after this
TAIL_NBYTES = 64 << 10  # of each rank's stderr, kept for the summary
BACKLOG_HIGH_NBYTES = 4 << 20  # the console is that far behind: stop reading from the ranks

_READ_NBYTES = 1 << 16


def log_path(log_dir: str, rank: int, fd: int) -> str:
    """Return the log file of one stream. log_path("logs", 2, 1) -> "logs/rank2.stdout.log"."""
    return os.path.join(log_dir, f"rank{rank}.{'stdout' if fd == 1 else 'stderr'}.log")


class RankStream:
    """One stream of one rank: pipe in; console lines, log file and tail out."""

    def __init__(
        self, pipe: IO[bytes], fd: int, prefix: bytes, *, screen: Console, shown: bool, log: IO[bytes] | None
    ) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.open = True
        self.tail = b""
        self._fd = fd
        self._prefix = prefix
        self._screen = screen
        self._shown = shown
        self._log = log
        self._rest = bytearray()
        self._rest_since = 0.0

    def pump(self, limit_nbytes: int = 1 << 20) -> None:
        """Read from the pipe, at most about `limit_nbytes`, so that no stream starves another."""
        moved = 0
        while self.open and moved < limit_nbytes:
            try:
                data = os.read(self.pipe.fileno(), _READ_NBYTES)
            except BlockingIOError:
                return
            if not data:
                self.finish()
                return
            moved += len(data)
            self._take(data)

    def _take(self, data: bytes) -> None:
        if self._log:
            self._write_log(data)
        if self._fd == 2:
            self.tail = (self.tail + data)[-TAIL_NBYTES:]
        if not self._shown:
            return
        if not self._rest:
            self._rest_since = time.monotonic()
        newline = data.rfind(b"\n") + 1
        if newline:
            self._screen.show(self._fd, self._prefix, bytes(self._rest) + data[:newline])
            self._rest = bytearray(data[newline:])
            self._rest_since = time.monotonic()
        else:
            self._rest += data
        if len(self._rest) >= LONGEST_LINE_NBYTES:
            self.show_partial()

    def log_only(self, data: bytes) -> None:
        """Write to the log file a text that the launcher shows for the rank."""
        if self._log:
            self._write_log(data)

    def _write_log(self, data: bytes) -> None:
        assert self._log is not None
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._log.write(rest) :]
        except OSError as error:
            self._screen.say(f"unisono run: {self._log.name} is incomplete from here on: {error.strerror}")
            self._log.close()
            self._log = None

    def partial_due(self) -> float | None:
        """When the unfinished line has to be shown (monotonic seconds), None when there is none."""
        if not self._rest or not self._screen.is_terminal[self._fd]:
            return None
        return self._rest_since + PARTIAL_AGE_S

    def show_partial(self) -> None:
        """Show the unfinished line."""
        if self._rest:
            self._screen.show(self._fd, self._prefix, bytes(self._rest))
            self._rest.clear()

    def finish(self) -> None:
        """Nothing more will come: show the last line even if it has no newline."""
        self.open = False
        if self._rest:
            self._screen.show(self._fd, self._prefix, bytes(self._rest) + b"\n")
            self._rest.clear()
        if self._log:
            with contextlib.suppress(OSError):
                self._log.close()


class OutputStreams:
    """All streams of a job, registered with the loop's selector while they may be read."""

    def __init__(self, job: Job, screen: Console, selector: selectors.BaseSelector) -> None:
        self._job = job
        self._screen = screen
        self._selector = selector
        self._streams: list[RankStream] = []
        self._paused = False

    def add(
        self, local_rank: int, rank: int, pipe: IO[bytes], fd: int, *, replaces: bool = False
    ) -> RankStream:
        """Take over the read end of one pipe of a rank. replaces: it goes on in the log of another one."""
        job, bit = self._job, STDOUT if fd == 1 else STDERR
        log: IO[bytes] | None = None
        if job.log_dir is not None and job.logged[local_rank] & bit:
            mode = "ab" if replaces else "wb"
            path = log_path(job.log_dir, rank, fd)
            log = open(path, mode, buffering=0)  # noqa: SIM115 - the stream closes it
        stream = RankStream(
            pipe,
            fd,
            prefix_of(rank, self._screen.color),
            screen=self._screen,
            shown=bool(job.shown[local_rank] & bit),
            log=log,
        )
        self._streams.append(stream)
        self._watch(stream)
        return stream

    def _watch(self, stream: RankStream) -> None:
        self._selector.register(stream.pipe, selectors.EVENT_READ, lambda: self._pump(stream))

    def _pump(self, stream: RankStream) -> None:
        if self._paused:
            return
        stream.pump()
        if not stream.open:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
        if self._screen.backlog_nbytes > BACKLOG_HIGH_NBYTES:
            self._paused = True
            for waiting in self.open():
                self._selector.unregister(waiting.pipe)

    def resume_if_drained(self) -> None:
        """Continue to read when the console has caught up."""
        if self._paused and self._screen.backlog_nbytes <= BACKLOG_LOW_NBYTES:
            self._paused = False
            for stream in self.open():
                self._watch(stream)

    def abandon(self) -> None:
        """Read the remaining bytes and close the pipes, although a process still has the other end."""
        for stream in [] if self._paused else list(self.open()):
            stream.pump()
            stream.finish()
            self._selector.unregister(stream.pipe)
            stream.pipe.close()

    def open(self) -> Iterator[RankStream]:
        """The streams to which a rank, or a process that it left behind, may still write."""
        return (stream for stream in self._streams if stream.open)

    def partial_due(self) -> float | None:
        """When the next unfinished line has to be shown."""
        return min((due for stream in self.open() if (due := stream.partial_due()) is not None), default=None)

    def show_partials(self, now: float) -> None:
        """Show the unfinished lines that have waited long enough."""
        for stream in self.open():
            due = stream.partial_due()
            if due is not None and due <= now:
                stream.show_partial()
