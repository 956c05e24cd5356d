"""Rank 0's handler aborts the group and raises SystemExit in the middle of a call; rank 1 is told."""

import os
import signal
import threading
import time

import numpy as np

import unisono as un


def handler(number: int, frame: object) -> None:
    group.abort()
    raise SystemExit(0)


def interrupt() -> None:
    while group.last_seen(0) != "in all_reduce #1":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


group = un.init_process_group(init_method=os.environ["MEETING"])
if group.rank == 0:
    signal.signal(signal.SIGTERM, handler)
    threading.Thread(target=interrupt).start()
    try:
        group.all_reduce(np.ones(1))
    except SystemExit:
        print("came through")
        raise
else:
    try:
        group.recv(np.zeros(1), 0)  # rank 0's call cannot end before its signal comes
    except un.Aborted:
        print("told")
