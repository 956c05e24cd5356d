"""A thousand new cases of ranks that differ in one thing, each time; the seed is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "mismatches.py"
CASES = "100" if "UNISONO_SANITIZED" in os.environ else "1000"


@pytest.mark.timeout(500)
def test_no_two_calls_that_differ_both_return() -> None:
    command = [sys.executable, str(PROGRAM), "--cases", CASES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=480)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{CASES} cases" in run.stdout
