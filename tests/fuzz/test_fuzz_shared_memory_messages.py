"""A short round of `shared_memory_messages.py`; the long one with the long tests, or by command."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import times

PROGRAM = Path(__file__).with_name("shared_memory_messages.py")
CASES = times(usual=30, long=1000, sanitized=10)


@pytest.mark.timeout(100 + CASES)
def test_messages_over_shared_memory_are_as_the_model_says() -> None:
    command = [sys.executable, str(PROGRAM), "--cases", str(CASES), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90 + CASES, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert f"{CASES} programs" in done.stdout
