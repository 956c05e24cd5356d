"""`receives_more_than_its_memory.py`: rank 1 has less memory than rank 0's object. Prints the errors."""

import os
import resource
from pathlib import Path

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
try:
    if group.rank == 0:
        group.send_object(np.zeros(1 << 30, np.uint8), 1)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
        group.recv_object(0)
except un.Aborted as error:
    print(error)
