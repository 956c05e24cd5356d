"""`leaves_with_works.py FOLDER ATTEMPTS`: a rank ends while its asynchronous calls are under way.

Run by test_torch_launch.py. Works and futures are globals: they live until the interpreter ends.
"""

import gc
import os
import sys

import torch
import torch._dynamo
import torch.distributed as dist

import unisono.torch.process_group  # noqa: F401  (takes seconds: once, before the ranks are forked)

gc.freeze()  # at their end the ranks need not look through all that PyTorch has made
for attempt in range(int(sys.argv[2])):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            store = dist.FileStore(f"{sys.argv[1]}/{attempt}", 2)
            dist.init_process_group("unisono", store=store, rank=rank, world_size=2)
            dist.barrier()
            if rank == 0:
                works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
                futures = [work.get_future().then(lambda future: future.value()) for work in works]
            else:
                store.wait(["left"])
            store.set("left", "")
            sys.exit()
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ends == [0, 0], ends
print("fine")
