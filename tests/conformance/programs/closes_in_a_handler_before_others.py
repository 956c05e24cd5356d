"""Rank 0 calls from two threads, and a handler closes the group while the call of the main thread waits."""

import os
import signal
import threading
import time
from pathlib import Path

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
closed = Path(os.environ["MEETING"].removeprefix("file://") + ".closed")
told = []


def call() -> None:
    try:
        group.barrier()
    except (un.Aborted, un.GroupClosed):  # the latter: the machine is busy, and it was not behind yet
        told.append("ended")


def interrupt() -> None:
    time.sleep(0.3)
    behind.start()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGUSR1)


if group.rank == 0:
    signal.signal(signal.SIGUSR1, lambda *_: group.close())
    behind = threading.Thread(target=call)
    threading.Thread(target=interrupt).start()
    call()
    behind.join()
    print(*told)
    closed.touch()
else:
    while not closed.exists():
        time.sleep(0.01)
