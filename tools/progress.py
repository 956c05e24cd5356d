"""Run a command that takes minutes: show its progress, keep its output in a log."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

QUIET_S = 10.0  # between two lines where the output is not a terminal
END_S = 10.0  # for the command to end after Ctrl-C
INTERRUPTED = 130


class Display:
    """The current stage and the time since the start: one line, or, without a terminal, occasional lines."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown_at = -QUIET_S
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Show a stage, if it is time."""
        elapsed = time.monotonic() - self._started
        line = f"    {text} ({elapsed:.0f} s)"
        if self._terminal:
            print(f"\r{line}\033[K", end="", flush=True)
        elif elapsed - self._shown_at >= QUIET_S:
            self._shown_at = elapsed
            print(line, flush=True)

    def end(self, text: str) -> None:
        """The last line."""
        erase = "\r\033[K" if self._terminal else ""
        print(f"{erase}    {text} ({time.monotonic() - self._started:.0f} s)", flush=True)


def lines_of(process: subprocess.Popen[bytes], for_s: float = float("inf")) -> Iterator[str]:
    """The output of a process, line by line, and "" in every second without output.

    Ends with the process, even if a child keeps the pipe open, or after `for_s` seconds.
    """
    assert process.stdout is not None
    pipe, rest, deadline = process.stdout.fileno(), b"", time.monotonic() + for_s
    while time.monotonic() < deadline:
        if not select.select([pipe], [], [], 1.0)[0]:
            if process.poll() is not None:
                break
            yield ""
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") + "\n" for line in lines)
    yield rest.decode(errors="replace")


def follow(
    command: list[str], log: Path, stage: Callable[[str], str | None], env: dict[str, str] | None = None
) -> int:
    """Run `command`, show its stages, and keep its output; returns its exit code.

    `stage` returns the stage that a line of output starts, if any; it gets "" once a second without output.
    After Ctrl-C, which a terminal sends to `command`, too, it has END_S to end by itself.
    """
    display, now = Display(), "asking pip"
    with (
        log.open("w", encoding="utf-8", buffering=1) as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process,
    ):
        try:
            for line in lines_of(process):
                now = stage(line) or now  # first: who has read the log may interrupt at once
                kept.write(line)
                display.show(now)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second one: wait no longer
                kept.writelines(lines_of(process, END_S))
            process.kill()
            display.end(f"interrupted while {now}")
            return INTERRUPTED
    display.end("installed" if process.returncode == 0 else f"failed while {now}")
    return process.returncode
