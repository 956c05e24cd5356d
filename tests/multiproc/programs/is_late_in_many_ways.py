"""Three ranks: in each group some never arrive, and do something else until rank 0 has its error.

Prints what each way is called, and the text of the Timeout.
"""

import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

import unisono as un

MEETING = os.environ["MEETING"]
x = np.ones(3)


def sleeps(over: str, _: un.Group) -> None:
    while not os.path.exists(over):
        time.sleep(0.3)


def computes(over: str, _: un.Group) -> None:
    matrix = np.random.default_rng(0).random((600, 600))
    while not os.path.exists(over):
        np.linalg.inv(matrix @ matrix)


def loops(over: str, _: un.Group) -> None:
    while not os.path.exists(over):
        sum(number for number in range(1000))


def reads_a_pipe(over: str, _: un.Group) -> None:
    reader, writer = os.pipe()
    threading.Thread(target=lambda: (sleeps(over, _), os.write(writer, b"x"))).start()
    os.read(reader, 1)


def waits_in_the_library(over: str, _: un.Group) -> None:
    arrived: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: (sleeps(over, _), arrived.put(1))).start()
    arrived.get()


def holds_the_gil(over: str, _: un.Group) -> None:
    while not os.path.exists(over):
        ctypes.PyDLL(None).usleep(300_000)


def waits_in_another_group(_: str, other: un.Group) -> None:
    other.barrier()


def is_stopped(_: str, __: un.Group) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def ignores_the_signal(over: str, _: un.Group) -> None:
    signal.signal(signal.SIGURG, signal.SIG_IGN)
    while not os.path.exists(over):
        time.sleep(0.3)


Way = Callable[[str, un.Group], None]
ONE: list[Way] = [sleeps, computes, loops, reads_a_pipe, waits_in_the_library, holds_the_gil]
WAYS: dict[str, dict[int, Way]] = {
    **{way.__name__: {2: way} for way in (*ONE, waits_in_another_group, is_stopped)},
    "two": {1: sleeps, 2: loops},
    "two alike": {1: sleeps, 2: sleeps},
    "ignores_the_signal": {2: ignores_the_signal},
}


def meet(name: str, late: dict[int, Way]) -> None:
    over = f"{MEETING.removeprefix('file://')}.{name}.over"
    world = un.init_process_group(init_method=f"{MEETING}.{name}")
    other = un.init_process_group(init_method=f"{MEETING}.{name}.other")
    world.barrier()
    if world.rank in late:
        late[world.rank](over, other)
    try:
        world.all_reduce(x, timeout=0.6)
        print(f"{name}\tno error", flush=True)
    except un.Timeout as error:
        assert error.report is not None
        print(f"{name}\t{error}", flush=True)
        if world.rank == 0:
            open(over, "w").close()
            if late.get(2) is is_stopped:
                os.kill(error.report.ranks[2].pid, signal.SIGCONT)
    if late.get(world.rank) is not waits_in_another_group:
        other.barrier()
    other.close()
    world.close()


def two_threads() -> None:
    """Rank 2 is late in two groups, in a thread for each."""
    ways = {"loops in a thread": loops, "sleeps in a thread": sleeps}
    threads = [threading.Thread(target=meet, args=(name, {2: way})) for name, way in ways.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


for name, late in WAYS.items():
    if name == "ignores_the_signal":
        two_threads()  # the last one to be answered
    meet(name, late)
