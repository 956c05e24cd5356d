"""Ranks that begin on one core go on until they run on several."""

import os
import time
from pathlib import Path

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
everywhere = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(everywhere)})
group.barrier()
os.sched_setaffinity(0, everywhere)


def core() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])


mine, all_cores, deadline = np.zeros(1), np.zeros((group.size, 1)), time.monotonic() + 300
while True:
    for _ in range(200):
        group.barrier()
    mine[0] = core()
    group.all_gather(all_cores, mine)
    late = np.array([float(time.monotonic() > deadline)])
    group.broadcast(late, src=0)
    if len(set(all_cores[:, 0])) > 1 or late[0]:
        break
assert len(set(all_cores[:, 0])) > 1, all_cores
assert os.sched_getaffinity(0) == everywhere
print("spread")
