"""Four ranks on two cores, two of them bound to one: many calls do not change where each may run."""

import os

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
everywhere = sorted(os.sched_getaffinity(0))
mine = {everywhere[0]} if group.rank < 2 else set(everywhere[:2])
os.sched_setaffinity(0, mine)
calls = []
for _ in range(400):
    group.barrier()
    calls.append(os.sched_getaffinity(0) == mine)
assert all(calls), "the calls have changed where this thread may run"
group.close()
assert os.sched_getaffinity(0) == mine
print("kept")
