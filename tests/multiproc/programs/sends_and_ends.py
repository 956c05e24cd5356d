"""Rank 0 ends after a send of 4 MB; rank 1 receives it two seconds later.

sends_and_ends.py [SECONDS]: then rank 1 lives that much longer.
"""

import sys
import time

import numpy as np

import unisono as un

NUMEL = 1 << 20
group = un.init_process_group()
if group.rank == 0:
    group.send(np.arange(NUMEL, dtype=np.float32), 1)
else:
    time.sleep(2)
    got = np.zeros(NUMEL, np.float32)
    group.recv(got, 0)
    print("received", int(got[-1]))
    time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)
