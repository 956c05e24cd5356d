"""`uses_a_timeout.py TIMEOUT ...`: two ranks give each to everything that takes one."""

import math
import os
import sys
from datetime import timedelta

import numpy as np

import unisono as un

TIMEOUTS = {
    "None": None,
    "1e10": 1e10,
    "2.2e6": 2.2e6,
    "math.inf": math.inf,
    "timedelta.max": timedelta.max,
    "timedelta(days=10000)": timedelta(days=10000),
}

for number, name in enumerate(sys.argv[1:]):
    print(name, flush=True)  # a failure shows the last one
    timeout = TIMEOUTS[name]
    group = un.init_process_group(init_method=f"{os.environ['MEETING']}{number}", timeout=timeout)
    half = group.subgroup([1, 0])
    x = np.ones(4)
    half.all_reduce(x, timeout=timeout)
    half.timeout_s = timeout or 60
    half.barrier(async_op=True).wait(timeout)
    other = 1 - group.rank
    group.sendrecv(x, other, np.empty(4), other, timeout=timeout)
    assert x[0] == 2, x
    half.close()
    group.close()
