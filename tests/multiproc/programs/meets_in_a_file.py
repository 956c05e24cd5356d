"""`meets_in_a_file.py FILE NAME RANK`: a process of a world of two ranks, whose number its caller chose."""

import sys

import numpy as np

import unisono as un
from unisono.engine.store import FileStore

path, name, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = FileStore(path)
with un.init_process_group(store=store, rank=rank, world_size=2, group_name=name) as group:
    x = np.ones(1)
    group.all_reduce(x)
    print(x[0])
