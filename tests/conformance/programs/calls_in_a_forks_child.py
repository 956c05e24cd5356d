"""Rank 0's fork calls the group of its parent, and prints the errors; the parent goes on."""

import os

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
group.all_reduce(np.ones(1))
if group.rank == 0 and os.fork() == 0:
    for call in (lambda: group.all_reduce(np.ones(1)), lambda: group.send(np.ones(1), 1)):
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
group.all_reduce(x := np.ones(1))
print(x[0])
group.barrier()
