"""Install Unisono by pip, and show how far the compiler is: pip alone says "still running" for a minute.

install_engine.py -e '.[dev]'       the arguments are those of `pip install`

Everything pip and the compiler say goes into a log; after a failure its end is shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v"]
OPTIONS = ["--no-build-isolation", "--progress-bar", "off"]
LOG = Path(sys.prefix, "engine-install.log")
SHOWN_LINES = 60  # of the log, after a failure
QUIET_S = 10.0  # between two lines where output is no terminal
END_S = 10.0  # for pip to end after Ctrl-C
INTERRUPTED = 130

STAGES = (
    (re.compile(r"\*\*\* Configuring CMake"), "configuring the engine's build"),
    (re.compile(r"\[([1-9]\d*)/(\d+)\] "), r"compiling the engine, step \1 of \2"),
    (re.compile(r"\*\*\* Installing project"), "installing the engine"),
    (re.compile(r"Collecting (\S+)"), r"fetching \1"),
    (re.compile(r"Installing collected packages"), "installing packages"),
)


def stage(line: str) -> str | None:
    """What a line of pip's output begins: "[3/40] Building ..." -> "compiling the engine, step 3 of 40"."""
    for pattern, words in STAGES:
        found = pattern.match(line.strip())
        if found:
            return found.expand(words)
    return None


class Display:
    """The current stage and the time since the start: one line, or, without a terminal, one now and then."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown_at = -QUIET_S
        self._terminal = sys.stdout.isatty()

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
    """What a process writes, line by line, and "" in every second in which it writes nothing.

    Ends with the process, even if one that it has started keeps the pipe, or after `for_s` seconds.
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


def follow(command: list[str], log: Path) -> int:
    """Run `command`, show the stages it goes through, and keep what it writes; its exit code.

    After Ctrl-C, of which a terminal tells `command` as well, that has END_S to end by itself.
    """
    display, now = Display(), "asking pip"
    with (
        log.open("w", encoding="utf-8", buffering=1) as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
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


def main(arguments: list[str]) -> int:
    """Return pip's exit code."""
    code = follow([*PIP, *OPTIONS, *arguments], LOG)
    if code == INTERRUPTED:
        print(f"interrupted; all pip said: {LOG}")
    elif code:
        print(*LOG.read_text(encoding="utf-8").splitlines()[-SHOWN_LINES:], sep="\n")
        print(f"error: pip failed with {code}; all it said: {LOG}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
