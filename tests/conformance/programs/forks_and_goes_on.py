"""A fork's child ends at once; its parent goes on."""

import os
import sys

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
group.all_reduce(np.ones(1), async_op=True).wait()
if os.fork() == 0:
    sys.exit(0)
os.wait()
group.all_reduce(x := np.ones(1))
print(x[0])
group.barrier()
