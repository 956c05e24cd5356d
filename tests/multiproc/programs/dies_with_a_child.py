"""Rank 1 forks a child with its connections, and dies; rank 0 prints what it is told, and kills the child."""

import os
import signal
import time

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
if group.rank == 1:
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        time.sleep(3600)
        os._exit(0)
    group.send(np.array([child, os.getpid()]), 0)
    group.recv(np.zeros(1), 0)  # dead only once that has come: with a rank the whole group ends
    os._exit(0)
group.recv(pids := np.zeros(2, np.int64), 1)
group.send(np.ones(1), 1)
try:
    group.barrier()
except un.PeerLost as error:
    assert (error.rank, error.pid) == (1, pids[1]), error
    print("told", error)
os.kill(int(pids[0]), signal.SIGKILL)
