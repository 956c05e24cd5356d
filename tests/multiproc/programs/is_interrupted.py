"""`is_interrupted.py CALL RAISED`: a SIGINT comes while rank 0 waits in CALL; rank 1 prints what it is told.

RAISED: by Python's own handler (KeyboardInterrupt), or by one of the caller's (ValueError, SystemExit).
"""

import os
import signal
import sys
import threading

import numpy as np

import unisono as un

ERRORS = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "ValueError": ValueError("bad loss"),
    "SystemExit": SystemExit(0),
}
CALLS = {
    "all_reduce": lambda: group.all_reduce(np.ones(1)),
    "recv": lambda: group.recv(np.ones(1), 1),
    "barrier": lambda: group.barrier(),
    "wait": lambda: group.barrier(async_op=True).wait(),
}

error = ERRORS[sys.argv[2]]


def handler(number: int, frame: object) -> None:
    raise error


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


if not isinstance(error, KeyboardInterrupt):
    signal.signal(signal.SIGINT, handler)
group = un.init_process_group(init_method=os.environ["MEETING"])
group.barrier()
if group.rank == 0:
    threading.Timer(0.4, interrupt).start()
    try:
        CALLS[sys.argv[1]]()
    except type(error):
        print("interrupted")  # and not told that the group's time is over
else:
    try:
        group.recv(np.ones(1), 0)  # whatever rank 0 waits for does not come, however late its Ctrl-C is
    except un.Aborted as aborted:
        print(aborted)
group.close()
