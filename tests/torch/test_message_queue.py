"""The interface of vLLM's `MessageQueue`: what its public tests ask of it, on groups of Gloo."""

from collections import Counter
from pathlib import Path

import pytest

import suite

PROGRAM = suite.HERE / "programs" / "message_queue_ranks.py"
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
def test_a_message_queue(
    forks: suite.Forks, tmp_path: Path, mode: str, printed: dict[str, int], per_host: str
) -> None:
    if (mode, per_host) == ("refuses", "2"):
        pytest.skip("a host's relay has room for more")
    found = forks.run_program(tmp_path, 4, PROGRAM, mode, UNISONO_RANKS_PER_HOST=per_host)
    lines = [line for text in found for line in text.splitlines() if not line.startswith("rank ")]
    assert Counter(lines) == printed
