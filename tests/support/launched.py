"""For programs that `unisono run` starts in tests: their rank, the status board, and a bounded wait."""

import os
import time
from collections.abc import Callable

from effort import HANG_S

rank = int(os.environ["RANK"])
board_fd = int(os.environ["UNISONO_STATUS_FD"].partition(":")[0])


def board() -> list[tuple[int, ...]]:
    """Per rank: its process, its state, and its exit code."""
    raw = os.pread(board_fd, 1 << 16, 0)
    words = memoryview(raw).cast("i")
    return [tuple(words[i : i + 3]) for i in range(0, len(words), 4)]


def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` holds."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
