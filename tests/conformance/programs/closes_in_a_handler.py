"""`closes_in_a_handler.py CALL`: a signal comes while rank 0 waits in CALL, and its handler closes the group.

CALL: "all_reduce" or "recv". Rank 1 comes when rank 0's call has ended, and prints what it is told.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import unisono as un

CALLS = {"all_reduce": lambda: group.all_reduce(np.ones(1)), "recv": lambda: group.recv(np.ones(1), 1)}

group = un.init_process_group(init_method=os.environ["MEETING"])
ended = Path(os.environ["MEETING"].removeprefix("file://") + ".ended")
if group.rank == 0:
    signal.signal(signal.SIGUSR1, lambda *_: group.close())
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        CALLS[sys.argv[1]]()
    except un.UnisonoError as error:
        print(type(error).__name__, group.closed)
    ended.touch()
else:
    try:
        while not ended.exists():
            time.sleep(0.01)
        group.barrier()
        group.barrier()
    except un.GroupError as error:
        print(error)
