"""`reduces_until_told.py STOP`: a job of two ranks that reduces until the file STOP is there."""

import os
import sys

import numpy as np

import unisono as un

world = un.init_process_group(timeout=60)
print("up", flush=True)
x = np.ones(100)
while not world.broadcast_object(os.path.exists(sys.argv[1])):  # one rank looks: two may see it a round apart
    for _ in range(20):
        x[:] = 1
        world.all_reduce(x)
        assert (x == 2).all()
    world.barrier()
world.close()
