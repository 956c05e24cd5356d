"""`fails_first.py FOLDER`: of four ranks rank 2 fails, ranks 0 and 1 because of it, and rank 3 stays."""

import os
import sys
import time

import unisono
from launched import board, rank, until

folder = sys.argv[1]
group = unisono.init_process_group()
group.barrier()
os.open(f"{folder}/{rank}", os.O_CREAT)
until(lambda: len(os.listdir(folder)) == 4)
if rank == 2:
    try:
        {}["inner"]
    except KeyError:
        raise ValueError("the cause")  # noqa: B904 (both are shown)
until(lambda: board()[2][1] == 2)
if rank == 3:
    time.sleep(3600)
group.barrier()
