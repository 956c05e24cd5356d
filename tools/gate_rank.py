"""A rank of `tools/gate.py`: python gate_rank.py CASE FOLDER RANK [TYPES].

Rank 0 runs under `count_instructions`. Before each call it waits until rank 1 has sent its message and
sleeps. Rank 0 then never polls, and the count does not depend on time. Both have two cores on every machine;
one gives the same figures.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono as un

WARM_UP = 10
COUNTED = {"empty": 4, "repeated": 12, "new": 5, "torch": 12, "bucket": 5}
PAUSE_S = 0.01


def is_asleep(pid: int) -> bool:
    """Return whether no thread of a process runs."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2][1] not in "RD" for stat in stats)


def wait_until_asleep(pid: int) -> None:
    """Return when a process was asleep three times in a row, or after 10 s."""
    asleep = 0
    for _ in range(1000):
        time.sleep(PAUSE_S)
        asleep = asleep + 1 if is_asleep(pid) else 0
        if asleep == 3:
            return


def torch_calls(case: str, folder: str, rank: int) -> Callable[[int], object]:
    """Return a call of PyTorch; "bucket": an asynchronous all_reduce and a wait for its future, as in DDP."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if case == "torch":
        same = torch.ones(1)
        return lambda _: dist.all_reduce(same)
    bucket = torch.ones(1000)
    return lambda _: dist.all_reduce(bucket, async_op=True).get_future().wait()


def main(case: str, folder: str, rank: int, types: int) -> None:
    """Make the calls of a case; `types` new types come first, and take so many versions."""
    for _ in range(types):
        hasattr(type("New", (), {}), "name")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    if rank == 0:
        peer = subprocess.Popen([sys.executable, __file__, case, folder, "1"])
    if case in ("torch", "bucket"):
        call = torch_calls(case, folder, rank)
    else:
        group = un.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2)
        same = np.ones(1, np.float32)
        arrays = [np.ones(size, np.float32) for size in range(2, 50)]
        calls: dict[str, Callable[[int], object]] = {
            "empty": lambda _: None,
            "repeated": lambda _: group.all_reduce(same),
            "new": lambda number: group.all_reduce(arrays[number]),
        }
        call = calls[case]
    gc.disable()
    for number in range(WARM_UP + COUNTED[case]):
        counts = rank == 0 and number >= WARM_UP
        if rank == 0:
            wait_until_asleep(peer.pid)
        if counts:
            signal.raise_signal(signal.SIGUSR1)
        call(number)
        if counts:
            signal.raise_signal(signal.SIGUSR1)
    if rank == 0 and peer.wait(60):
        sys.exit("rank 1 failed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int((sys.argv[4:] or ["0"])[0]))
