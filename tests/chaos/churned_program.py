"""A rank of a job under churn: makes calls with known results until it is told to end, in every group.

The controller and the ranks share a file: for each local rank a fault that the rank does to itself (0: none,
1: raise, 2: slow), and for the job whether it ends (the last byte). Each second a rank appends a line to its
log: time, steps, generation, size, resident bytes, descriptors.
"""

import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
from operations_of_ranks import call

import unisono as un

SLOW_S = 4.0
TIMEOUT_S = 2.5
RAISE, SLOW = 1, 2
EVERY = 8  # calls of each step


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Log:
    """What this process has done, for the controller."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"log{os.getpid()}", "w", buffering=1)  # noqa: SIM115 - until the end
        self._due = 0.0

    def note(self, step: int, group: un.Group, *, now: bool = False) -> None:
        at = time.monotonic()
        if at < self._due and not now:
            return
        self._due = at + 1.0
        descriptors = len(os.listdir("/proc/self/fd"))
        self._file.write(
            f"{at:.3f} {step} {group.generation} {group.size} {resident_bytes()} {descriptors}\n"
        )


def main() -> None:
    folder, most = Path(sys.argv[1]), int(sys.argv[2])
    with open(folder / "faults", "r+b") as file:
        faults = mmap.mmap(file.fileno(), 0)
    slot, log, step = int(os.environ["RANK"]), Log(folder), 0
    for group in un.elastic(timeout=60.0):
        group.timeout_s = TIMEOUT_S
        with group:
            step = int(group.all_reduce(step, un.MAX))
            log.note(step, group, now=True)
            while True:
                own, faults[slot] = faults[slot], 0
                if own == RAISE:
                    raise ValueError("bad loss")
                if own == SLOW:
                    time.sleep(SLOW_S)
                for number in range(EVERY):
                    call(group, f"{group.generation} {step}", number, most)
                step += 1
                log.note(step, group)
                flags = np.array([float(faults[-1]), float(step % 4 == 0)])
                group.all_reduce(flags, un.MAX)
                if flags[0]:
                    break
                if flags[1] and group.waiting():
                    break
        if faults[-1]:
            break
    print(f"ended at step {step}", flush=True)


if __name__ == "__main__":
    main()
