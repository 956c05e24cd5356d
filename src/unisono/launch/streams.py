"""From the ranks' pipes to the console and to log files; nothing is lost, nobody is starved.

A log file gets exactly the bytes the rank wrote, the console gets whole lines (see `screen`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterator
from typing import IO

from unisono.launch.job import STDERR, STDOUT, Job
from unisono.launch.screen import BACKLOG_LOW_NBYTES, Screen, prefix_of

__all__ = ["LONGEST_LINE_NBYTES", "RankStream", "Streams", "log_path"]

LONGEST_LINE_NBYTES = 8 << 20  # a longer line is passed on in pieces
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
        self, pipe: IO[bytes], fd: int, prefix: bytes, *, screen: Screen, shown: bool, log: IO[bytes] | None
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
        """Move what the pipe holds, at most about `limit_nbytes` so that no stream starves another."""
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
        """Show the unfinished line as far as it has come."""
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


class Streams:
    """All streams of a job, registered with the loop's selector while they may be read."""

    def __init__(self, job: Job, screen: Screen, selector: selectors.BaseSelector) -> None:
        self._job = job
        self._screen = screen
        self._selector = selector
        self._streams: list[RankStream] = []
        self._paused = False

    def add(self, local_rank: int, rank: int, pipe: IO[bytes], fd: int) -> RankStream:
        """Take over the read end of one pipe of a rank."""
        job, bit = self._job, STDOUT if fd == 1 else STDERR
        log: IO[bytes] | None = None
        if job.log_dir is not None and job.logged[local_rank] & bit:
            log = open(log_path(job.log_dir, rank, fd), "wb", buffering=0)  # noqa: SIM115 - the stream closes it
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
        """Read on once the console has caught up."""
        if self._paused and self._screen.backlog_nbytes <= BACKLOG_LOW_NBYTES:
            self._paused = False
            for stream in self.open():
                self._watch(stream)

    def abandon(self) -> None:
        """Take what the pipes hold and close them, although somebody still has their other end."""
        for stream in [] if self._paused else list(self.open()):
            stream.pump()
            stream.finish()
            self._selector.unregister(stream.pipe)
            stream.pipe.close()

    def open(self) -> Iterator[RankStream]:
        """The streams whose ranks (or what they left behind) may still write."""
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
