"""`unisono run` for tests: a mark identifies all processes of a job.

A script is the path of a program, which may import `launched`, or one line of text, in which the names of
`launched` and a few modules are known.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from effort import HANG_S

HERE = str(Path(__file__).resolve().parent)
# Signals that a shell's background job ignores, and an interactive one does not.
DEFAULT_SIGNALS = ["env", "--default-signal=INT,TERM,HUP"]
# Comes before a script that is text.
OPENING = "import os, signal, sys, time; from launched import rank, until\n"


class Launcher:
    """Starts `unisono run`; scripts that are text are written into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environ = {**os.environ, "LAUNCH_TEST_MARK": self.mark}
        self.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environ.pop("OMP_NUM_THREADS", None)

    def command(self, script: str | Path, *flags: str, args: tuple[str, ...] = ()) -> list[str]:
        """The command line that runs `script`."""
        path = script if isinstance(script, Path) else self.folder / "script.py"
        if isinstance(script, str):
            path.write_text(OPENING + script)
        return [*DEFAULT_SIGNALS, sys.executable, "-m", "unisono", "run", *flags, str(path), *args]

    def run(
        self, script: str | Path, *flags: str, args: tuple[str, ...] = (), stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; returns the output. Only the test's own limit ends this wait."""
        command = self.command(script, *flags, args=args)
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, input=stdin)

    def start(self, script: str | Path, *flags: str, args: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start, without waiting."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(script, *flags, args=args), env=self.environ, text=True, stdout=pipe, stderr=pipe
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


def wait_until(condition: Callable[[], object], seconds: float = HANG_S) -> None:
    """Wait until `condition()` holds; fail when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The next lines of its standard output."""
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]
