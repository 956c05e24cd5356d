"""Rank 0 raises a Timeout, but a thread keeps it alive; rank 1 never calls."""

import threading
import time

import unisono as un
from launched import rank

group = un.init_process_group()
if rank == 0:
    threading.Thread(target=time.sleep, args=(600,)).start()
    group.barrier(timeout=0.5)
else:
    time.sleep(600)
