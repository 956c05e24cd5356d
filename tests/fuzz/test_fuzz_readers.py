"""A short round of `readers.py`; the long one with the long tests, or by command."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S, times

PROGRAM = Path(__file__).with_name("readers.py")
CASES = times(usual=150, long=5000, sanitized=50)


@pytest.mark.timeout(HANG_S + CASES)
def test_damaged_files_are_refused_with_one_clear_error() -> None:
    pytest.importorskip("google.protobuf")
    command = [sys.executable, str(PROGRAM), "--cases", str(CASES), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S + CASES)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-8000:]}"
