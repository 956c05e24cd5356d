"""A short round of `message_order.py`; the long one with the long tests, or by command."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import times

PROGRAM = Path(__file__).with_name("message_order.py")
ROUNDS = times(usual=150, long=10_000, sanitized=30)


@pytest.mark.timeout(120 + ROUNDS)
def test_messages_follow_the_order_rules_of_mpi() -> None:
    command = [sys.executable, str(PROGRAM), "--rounds", str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100 + ROUNDS, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert f"{ROUNDS} rounds" in done.stdout
