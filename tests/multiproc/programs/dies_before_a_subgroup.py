"""`dies_before_a_subgroup.py AFTER_S`: rank 1 dies in place of making a group.

The others print what they are told.
"""

import os
import sys
import time

import unisono as un

after_s = float(sys.argv[1])
group = un.init_process_group(init_method=os.environ["MEETING"])
group.barrier()
if group.rank == 1:
    time.sleep(after_s)
    os._exit(0)  # without a word, but not by a failure, which the test would report
else:
    try:
        group.subgroup(range(group.size))
    except un.GroupError as error:
        print(type(error).__name__, error)
    group.close()
