"""Rank 0 ends after a send of 4 MB; rank 1 receives it when a file is there: sends_and_ends.py FILE."""

import sys
import time
from pathlib import Path

import numpy as np

import unisono as un

NUMEL = 1 << 20
group = un.init_process_group()
if group.rank == 0:
    group.send(np.arange(NUMEL, dtype=np.float32), 1)
else:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    got = np.zeros(NUMEL, np.float32)
    group.recv(got, 0)
    print("received", int(got[-1]))
