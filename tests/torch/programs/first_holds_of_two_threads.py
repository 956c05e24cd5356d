"""Two threads give a tensor to an asynchronous call for the first time, at once. Run by test_threads.py."""

import faulthandler
import sys
import threading
import time
from types import FrameType

import numpy as np
import torch

import ranks

inside = threading.Event()
groups = ranks.groups(2)
planned = [group.all_reduce(np.ones(3, np.float32), async_op=True) for group in groups]


def pause(frame: FrameType, event: str, arg: object) -> None:
    if frame.f_code.co_name == "places":
        inside.set()
        time.sleep(0.05)


def first() -> None:
    sys.setprofile(pause)
    work = groups[0].all_reduce(torch.ones(3), async_op=True)
    sys.setprofile(None)
    work.wait()


def second() -> None:
    inside.wait(1)
    groups[1].all_reduce(torch.ones(3), async_op=True).wait()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)
    for work in planned:
        work.wait()
    threads = [threading.Thread(target=one, daemon=True) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
