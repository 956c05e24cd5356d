"""The interface of vLLM's `MessageQueue`: what its public tests ask of it, on groups of Gloo."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from effort import HANG_S

PROGRAM = Path(__file__).resolve().parent / "programs" / "message_queue_ranks.py"
CANCELLED = "['timeout', 'cancelled']"


@pytest.mark.parametrize("per_host", ["0", "2"])
@pytest.mark.parametrize(
    ("mode", "printed"),
    [
        ("broadcast", {"equal": 4}),
        ("shutdown", {"[]": 1, CANCELLED: 3}),
        ("wakes", {"read": 4}),
        ("refuses", {"Only readers can dequeue": 1, "Only writers can enqueue": 3}),
    ],
)
def test_a_message_queue(mode: str, printed: dict[str, int], per_host: str) -> None:
    if (mode, per_host) == ("refuses", "2"):
        pytest.skip("a host's relay has room for more")
    ended = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "-n", "4", str(PROGRAM), mode],
        env={**os.environ, "UNISONO_RANKS_PER_HOST": per_host},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines() if line.startswith("[rank")]
    assert Counter(lines) == printed
