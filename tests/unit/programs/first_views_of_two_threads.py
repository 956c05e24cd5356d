"""Two threads call `view` for the first time at once. Run by test_buffers.py."""

import faulthandler
import sys
import threading
import time

import numpy as np

from unisono import _native as native

inside = threading.Event()
x = np.zeros(4)


def pause(frame, event, arg) -> None:
    inside.set()
    time.sleep(0.05)


def first() -> None:
    sys.setprofile(pause)
    native.view(x, True)
    sys.setprofile(None)


def second() -> None:
    inside.wait(1)
    native.view(x, True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)
    threads = [threading.Thread(target=one, daemon=True) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
