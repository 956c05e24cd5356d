"""`calls_in_a_handler.py CALL`: rank 0's handler of a signal calls a collective, and prints the error.

CALL: "barrier", or "wait": for one that is queued.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import unisono as un

queued = sys.argv[1] == "wait"
handled = Path(os.environ["MEETING"].removeprefix("file://") + ".handled")


def handler(number: int, frame: object) -> None:
    try:
        if queued:
            group.barrier(async_op=True).wait()
        else:
            group.barrier()
    except RuntimeError as error:
        print(error)
    handled.touch()


def interrupt() -> None:
    while group.last_seen(0) != "in all_reduce #1":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)


group = un.init_process_group(init_method=os.environ["MEETING"])
if group.rank:
    while not handled.exists():
        time.sleep(0.01)
else:
    signal.signal(signal.SIGUSR1, handler)
    threading.Thread(target=interrupt).start()
group.all_reduce(x := np.ones(1))
print(x[0])
group.barrier()
if group.rank and queued:
    group.barrier()
