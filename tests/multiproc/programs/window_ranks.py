"""Ranks of a window: `window_ranks.py MODE`. The test says what each mode must print, or how it must end."""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np

import unisono as un
import window_model
from unisono import Group, Window


def model(group: Group) -> None:
    """Random programs, with arrays that are mapped and arrays that are not."""
    for seed in range(4):
        window_model.run(group, seed, 4, un.empty if seed % 2 else np.empty)
    print("equal")


def asleep(group: Group) -> None:
    """Rank 0 holds the GIL while the others use its array."""
    array = np.zeros(2, np.int64)
    with group.window(array) as window:
        window.fence()
        began = time.monotonic()
        if group.rank == 0:
            ctypes.PyDLL(None).usleep(1_500_000)
        else:
            for _ in range(50):
                window.fetch_and_op(1, 0)
                with window.lock(0):
                    window.put(window.get(np.empty(1, np.int64), 0, 1) + 1, 0, 1)
            print("served" if time.monotonic() < began + 1.4 else "late")
        window.fence()
        if group.rank == 0:
            print(array.tolist())


def ended(group: Group) -> None:
    """More ranks than cores end a window: the first ones are gone while the last ones wait."""
    for _ in range(20):
        with group.window(np.zeros(2)) as window:
            window.fence()
    print("ended")


def killed(group: Group) -> None:
    """Rank 0 dies with a lock; the others wait for it."""
    window = group.window(np.zeros(1))
    if group.rank == 0:
        with window.lock(1):
            group.barrier()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    survive(lambda: window.lock(1).__enter__())


def target(group: Group) -> None:
    """Rank 0 dies; the others still write to it."""
    window = group.window(un.empty(1))
    group.barrier()
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    survive(lambda: forever(window))


def forever(window: Window) -> None:
    """Write to rank 0 until that fails."""
    while True:
        window.put(np.ones(1), 0)
        window.flush(0)
        time.sleep(0.001)


def survive(call: object) -> None:
    """Print the error of a call, and end in order."""
    try:
        call()  # type: ignore[operator]
    except un.PeerLost as error:
        print(f"PeerLost of rank {error.rank}", flush=True)
        time.sleep(0.5)  # the others, too


def closed(group: Group) -> None:
    """Rank 0 closes its group while a thread of it waits in a call of a window."""
    window, found = group.window(np.zeros(1)), []
    group.barrier()
    if group.rank != 0:
        survive(group.barrier)
        return

    def wait() -> None:
        try:
            window.fence()
        except un.GroupClosed:
            found.append("GroupClosed")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    group.close()
    thread.join()
    print(*found, "at once" if time.monotonic() - begun < 2 else "late")


def forked(group: Group) -> None:
    """A forked child's copy does nothing, and ends."""
    with group.window(np.zeros(1)) as window:
        child = os.fork()
        if child == 0:
            try:
                window.put(np.ones(1), 0)
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        window.fence()
        window.put(np.ones(1), (group.rank + 1) % group.size)


if __name__ == "__main__":
    with un.init_process_group() as world:
        globals()[sys.argv[1]](world)
