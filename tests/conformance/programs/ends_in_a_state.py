"""A process ends while its group is in some state. Run by test_process_ends.py: STATE ENDING SEED.

Daemon threads go on calling until the end. Both ranks are in this process, as if on one host or on two.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ranks
import unisono as un

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
state, ending, seed = sys.argv[1:]
chance = random.Random(seed)
CHANGING = ("shrinking", "shrunk", "listening")
per_host = chance.choice([2, 1] if state in CHANGING else [None, 1])
one, two = groups = ranks.groups(2, per_host=per_host, timeout_s=30.0)
works: list[object] = []


def small() -> np.ndarray:
    return np.ones(10, np.float32)


def goes_on(*calls: Callable[[], object]) -> None:
    """Daemon threads that make one call each, again and again."""

    def repeat(call: Callable[[], object]) -> None:
        while True:
            try:
                call()
            except (un.UnisonoError, RuntimeError):  # RuntimeError: join, once Python starts no thread
                time.sleep(0)

    for call in calls:
        threading.Thread(target=repeat, args=(call,), daemon=True).start()
    time.sleep(0.02 * chance.random())


def starts() -> None:
    works.extend(one.all_reduce(np.ones(1000, np.float32), async_op=True) for _ in range(5))
    works.extend([one.irecv(small(), 1, 7), two.isend(np.ones(1_000_000, np.float32), 0, 8)])


def each(call: Callable[[un.Group], object]) -> list[object]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, groups))


def busy() -> None:
    goes_on(
        lambda: one.all_reduce(small()),
        lambda: two.all_reduce(small()),
        lambda: one.recv(small(), 1, 7),
        lambda: two.send(small(), 0, 7),
    )


if state in ("calls", "failed"):  # every way to wait; nobody answers
    goes_on(
        lambda: one.all_reduce(small()),
        lambda: two.recv(small(), 0, 5),
        lambda: one.irecv(small(), 1, 7).wait(),
        lambda: two.probe(0, 9),
        lambda: one.recv_object(1, 11),
    )
if state == "failed":
    one.abort()
    time.sleep(0.02 * chance.random())
if state == "busy":
    busy()
if state == "shrinking":  # the other rank does not come
    goes_on(lambda: two.recv(small(), 0, 5), one.shrink)
if state == "shrunk":
    one, two = groups = each(un.Group.shrink)
    busy()
if state == "listening":
    [address, *_], _ = each(un.Group.listen)
    goes_on(one.waiting, two.waiting, lambda: un.join(address, timeout=5))
if state == "closed":
    goes_on(lambda: one.recv(small(), 1, 7))
    one.close()
if state in ("pending", "dropped"):
    starts()
if state == "dropped":
    del groups, one
    if chance.random() < 0.5:
        gc.collect()
    if chance.random() < 0.5:
        works.clear()

if ending == "exit":
    sys.exit()
if ending == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
if ending == "exception":
    raise SystemError("this ends the program")
