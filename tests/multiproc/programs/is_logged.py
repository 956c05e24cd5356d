"""A few collectives, a signal if it is asked for, and another log afterwards."""

import os
import signal

import numpy as np

import unisono as un

with un.init_process_group() as group:
    x = np.ones(4, np.float32)
    for _ in range(3):
        group.all_reduce(x)
    group.all_reduce(np.ones(5, np.float32))  # of the same size class
    group.broadcast(np.ones(1 << 18), 0)
    group.all_reduce(x, algorithm="ring")
    group.subgroup([1])
    if os.environ.get("UNISONO_LOG_SIGNAL"):
        signal.raise_signal(signal.SIGUSR2)
        group.all_reduce(x)
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        group.all_reduce(np.ones(4096, np.float32))
    un.log("debug", os.environ["AFTERWARDS"])
    group.all_reduce(x)
    un.log("off")
    group.all_reduce(np.ones(1 << 14))
