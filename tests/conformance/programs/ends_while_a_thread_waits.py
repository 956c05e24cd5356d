"""Rank 0 ends while a daemon thread waits for a message."""

import contextlib
import os
import threading
import time

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])


def wait() -> None:
    # Nothing is printed: Python aborts where a daemon thread does so in the very moment of its end.
    with contextlib.suppress(un.UnisonoError):
        group.recv(np.zeros(1), 1)


group.barrier()
if group.rank == 0:
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
else:
    time.sleep(0.5)
