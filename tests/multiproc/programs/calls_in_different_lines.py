"""Two ranks call different things, in lines with a mark that the test looks for; they print the Mismatch."""

import os
import time
from collections.abc import Callable

import numpy as np

import unisono as un
from unisono.engine.diagnosis import fault_reader

fault_reader.SOURCE_LINE_PATIENCE_S = 20  # a rank may get no turn on a core for a while
group = un.init_process_group(init_method=os.environ["MEETING"])
rank = group.rank


def told(call: Callable[[un.Group], None]) -> None:
    inner = group.subgroup(range(group.size))
    try:
        call(inner)
    except un.Mismatch as error:
        print(str(error).replace(inner.name, "group"), flush=True)
    print("--", flush=True)
    inner.close()


def blocking(g: un.Group) -> None:
    if rank == 1:
        g.all_reduce(np.ones(3), un.MAX)  # A
    g.all_reduce(np.ones(3))  # B


def queued(g: un.Group) -> None:
    work = (
        g.all_reduce(np.ones(2), async_op=True)  # C
        if rank == 1
        else g.all_reduce(np.ones(3), async_op=True)  # D
    )
    time.sleep(0.3)
    work.wait()


def ahead(g: un.Group) -> None:
    if rank == 0:
        g.broadcast(np.ones(3), 0)  # E: rank 0 could finish this alone
    g.barrier()  # F


def message(g: un.Group) -> None:
    g.recv(np.ones(3), 1, 5) if rank == 0 else g.send(np.ones(2, np.int32), 0, 5)  # G
    g.barrier()


for each in (blocking, queued, ahead, message):
    told(each)
group.close()
