"""A program that is not elastic: it ends with its first lost rank. Argument: the RANK that is killed."""

import os
import signal
import sys

import numpy as np

import unisono as un

with un.init_process_group() as group:
    for step in range(1000):
        if step == 20 and os.environ["RANK"] == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(np.ones(100))
