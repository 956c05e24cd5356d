"""Rank 1 calls broadcast where the others call all_reduce."""

import numpy as np

import unisono as un
from launched import rank

group = un.init_process_group()
x = np.ones(4, np.float32)
if rank == 1:
    group.broadcast(x, 0)
else:
    group.all_reduce(x)
