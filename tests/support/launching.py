"""`unisono run` for tests: scripts are text, and a mark identifies all their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

# Signals that a shell's background job ignores, and an interactive one does not.
DEFAULT_SIGNALS = ["env", "--default-signal=INT,TERM,HUP"]
# Comes before every script: its rank, the status board, and a bounded wait.
PRELUDE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def board():
    raw = os.pread(int(os.environ["UNISONO_STATUS_FD"]), 1 << 16, 0)
    words = memoryview(raw).cast("i")
    return [tuple(words[i : i + 3]) for i in range(0, len(words), 4)]
def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
"""


class Launcher:
    """Starts `unisono run` on scripts in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environ = {**os.environ, "LAUNCH_TEST_MARK": self.mark}
        self.environ.pop("OMP_NUM_THREADS", None)

    def command(self, script: str, *flags: str, args: tuple[str, ...] = ()) -> list[str]:
        """The command line that runs `script`."""
        path = self.folder / "script.py"
        path.write_text(PRELUDE + script)
        return [*DEFAULT_SIGNALS, sys.executable, "-m", "unisono", "run", *flags, str(path), *args]

    def run(
        self, script: str, *flags: str, args: tuple[str, ...] = (), stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; returns the output. Only the test's own limit ends this wait."""
        command = self.command(script, *flags, args=args)
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, input=stdin)

    def start(self, script: str, *flags: str) -> subprocess.Popen[str]:
        """Start, without waiting."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(script, *flags), env=self.environ, text=True, stdout=pipe, stderr=pipe
        )

    def alive(self) -> list[int]:
        """Every living process that carries the mark in its environment."""
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
        return found

    def shared_memory(self) -> list[str]:
        """The files in /dev/shm that the ranks have made, under names with the mark."""
        return [name for name in os.listdir("/dev/shm") if self.mark in name]


@contextlib.contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """Make a Launcher; afterwards no process and no shared memory of its ranks may be left."""
    made = Launcher(folder)
    yield made
    left = made.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"
    wait_until(lambda: not made.shared_memory())  # Python's resource tracker may still be removing it


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition()` holds; fail when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The next lines of its standard output."""
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]
