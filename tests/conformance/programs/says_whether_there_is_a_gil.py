"""Use every part of the engine that a program without PyTorch loads; say whether Python has its GIL then."""

import sys

import numpy as np

import unisono as un

with un.init_process_group(store=un.HashStore(), rank=0, world_size=1) as group:
    group.all_reduce(np.ones(3))
    group.all_gather_object({"a": 1})
print("GIL" if getattr(sys, "_is_gil_enabled", lambda: True)() else "no GIL")
