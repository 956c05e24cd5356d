"""Rank 0 closes a group while it sends, and writes to the memory afterwards; rank 1 must not receive that."""

import contextlib
import os
import time

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
for turn in range(20):
    inner = group.subgroup([0, 1])
    x = np.zeros(1 << 20)
    if group.rank == 0:
        x[:] = 1
        work = inner.isend(x, 1)
        time.sleep(turn % 5 * 2e-4)
        inner.close()
        x[:] = 2
    else:
        with contextlib.suppress(un.GroupError):
            inner.recv(x, 0)
            assert (x == 1).all(), f"turn {turn}: {np.unique(x)}"
        inner.close()
    group.barrier()
print("fine")
