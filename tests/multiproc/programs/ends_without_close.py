"""Rank 1 ends without a close; rank 0 prints what it is told."""

import os

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
group.all_reduce(np.ones(1))
if group.rank == 0:
    try:
        group.barrier()
    except un.PeerLost as error:
        print(error)
