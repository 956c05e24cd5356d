"""New cases of ranks that differ in one thing, each time; the seed is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import times

PROGRAM = Path(__file__).parent / "mismatches.py"
CASES = times(usual=500, long=10_000, sanitized=100)
LIMIT_S = 60 + CASES // 5


@pytest.mark.timeout(LIMIT_S + 20)
def test_no_two_calls_that_differ_both_return() -> None:
    command = [sys.executable, str(PROGRAM), "--cases", str(CASES), "--workers", "8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{CASES} cases" in run.stdout
