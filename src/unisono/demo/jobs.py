"""Starts the ranks of one training run with the launcher, and reads the reports of rank 0."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from unisono import env
from unisono.launch.process import start

__all__ = ["TrainingJob"]

MARK = '{"unisono_demo"'
# The launcher ends an interrupted job within 3 s.
INTERRUPT_TIMEOUT_S = 5.0


class TrainingJob:
    """`unisono run -n ranks -m module ...`, which ends with this process.

    A context manager: an early exit interrupts the job and its ranks.

    Args:
        show: called with every line of output that is not a report, such as a failing rank's traceback.
    """

    def __init__(self, ranks: int, module: str, arguments: list[str], show: Callable[[str], None]) -> None:
        self.show = show
        command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "-m", module]
        environ = env.copy()
        environ.pop("UNISONO_REPLACE", None)  # "gloo" is to be Gloo here
        environ.setdefault("OMP_NUM_THREADS", "1")
        self.process = start(command + arguments, environ, stdin=subprocess.DEVNULL, pass_fds=())

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is None:
                self._interrupt()
        finally:
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield rank 0's reports until the job has ended."""
        for line in self._lines():
            at = line.find(MARK)
            if at >= 0:
                yield json.loads(line[at:])
            elif line.strip():
                self.show(line)
        self.process.wait()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job, as in a shell."""
        return self.process.poll()

    def _lines(self) -> Iterator[str]:
        """Whole lines of both streams, in order of arrival."""
        rests: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ)
                rests[stream.fileno()] = b""
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    *lines, rests[key.fd] = (rests[key.fd] + data).split(b"\n")
                    if not data:
                        selector.unregister(_stream(key))
                        lines = [rests.pop(key.fd)]
                    yield from (line.decode(errors="replace") for line in lines)

    def _interrupt(self) -> None:
        """End the job as by Ctrl-C; kill it if it continues."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=INTERRUPT_TIMEOUT_S)
            return
        self.process.kill()
        self.process.wait()


def _stream(key: selectors.SelectorKey) -> IO[bytes]:
    stream = key.fileobj
    assert not isinstance(stream, int)
    return stream  # type: ignore[return-value]
