"""Every way to end a process in every state of a group."""

import itertools
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ranks
from effort import HANG_S, times
from python_runs import ran

PROGRAM = Path(__file__).parent / "programs" / "ends_in_a_state.py"
STATES = (
    "idle", "calls", "failed", "busy", "closed", "pending", "dropped", "shrinking", "shrunk", "listening",
)  # fmt: skip
ENDINGS = {"return": 0, "exit": 0, "interrupt": -signal.SIGINT, "exception": 1}
ROUNDS = times(usual=1, long=100)
AT_ONCE = 6  # more than there are cores, so that a thread may be stopped at any place


@pytest.mark.timeout(HANG_S + 10 * ROUNDS)
@pytest.mark.parametrize("state", STATES)
def test_a_process_ends_as_python_ends_it(state: str) -> None:
    """A daemon thread that was in a call met Python's end inside a destructor: SIGABRT."""
    runs = list(itertools.product([state], ENDINGS, map(str, range(ROUNDS))))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(run, runs))
    wrong = [
        f"{' '.join(arguments)}: {code}\n{text}"
        for arguments, (code, text) in zip(runs, ended, strict=True)
        if code != ENDINGS[arguments[1]]
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(runs)}", *wrong[:5]])


@pytest.mark.parametrize("function", ["outcome", "call", "iterator"])
def test_a_thread_below_a_native_call_ends_no_process(function: str) -> None:
    """Nanobind took the end of the thread for an exception: SIGSEGV in every third run, in all of a wheel."""
    command = [sys.executable, str(PROGRAM.with_name("ends_below_a_native_call.py")), function]
    codes = [subprocess.run(command, timeout=HANG_S).returncode for _ in range(times(4, 100))]
    assert set(codes) == {0}, codes


def run(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Return how one process ends, and the end of what it prints."""
    done = ran(PROGRAM, *arguments, PYTHONPATH=ranks.HERE)
    return done.returncode, done.stderr[-1000:]
