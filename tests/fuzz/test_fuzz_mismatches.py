"""New cases of ranks that differ in one thing, each time; the seed is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S, times

PROGRAM = Path(__file__).parent / "mismatches.py"
CASES = times(usual=250, long=10_000, sanitized=100)


@pytest.mark.timeout(HANG_S + CASES // 5)
def test_no_two_calls_that_differ_both_return() -> None:
    command = [sys.executable, str(PROGRAM), "--cases", str(CASES), "--workers", "8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S + CASES // 5)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{CASES} cases" in run.stdout
