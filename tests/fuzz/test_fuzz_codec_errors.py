"""A short round of `codec_errors.py`; the long one with the long tests, or by command."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S, times

PROGRAM = Path(__file__).with_name("codec_errors.py")
CASES = times(usual=300, long=10_000)


@pytest.mark.timeout(HANG_S + CASES / 5)
def test_no_error_is_above_its_bound() -> None:
    command = [sys.executable, str(PROGRAM), "--cases", str(CASES), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S + CASES / 5)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
