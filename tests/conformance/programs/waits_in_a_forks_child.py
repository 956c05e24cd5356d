"""Rank 0's fork waits for what its parent began, and prints the errors; the parent's own waits succeed."""

import os

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
if group.rank == 0:
    works = [group.irecv(x := np.zeros(1), 1), group.all_reduce(np.ones(1), async_op=True)]
    if (child := os.fork()) == 0:
        for call in [work.wait for work in works] + [group.abort]:
            try:
                call()
            except RuntimeError as error:
                os.write(1, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
    group.send(np.zeros(1), 1)
    for work in works:
        work.wait()
    print("got", x[0])
else:
    group.recv(x := np.ones(1), 0)
    group.send(np.full(1, 7.0), 0)
    group.all_reduce(x)
group.barrier()
