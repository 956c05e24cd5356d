"""Processes end while a process group is in some state: `ends_with_a_group.py ROUNDS [BACKEND ...]`.

Run by test_torch_ends.py. Each process is a fork of this one, which has imported PyTorch, and both ranks of a
group are in it. Daemon threads go on calling until the end. Prints which processes ended in another way than
Python ends them.

    unisono    `torch.distributed` over Unisono
    gloo       Unisono over PyTorch's Gloo
"""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import unisono as un
from effort import crossed
from unisono.engine.backends import pytorch  # noqa: F401  (once, before the forks)
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch.reconfiguration import ReconfigureOptions

STATES = ("idle", "calls", "failed", "busy", "closed", "pending", "dropped")
CHANGED = ("reconfigured", "unconnected")  # states of PyTorch's groups only
ENDINGS = {"return": 0, "exit": 0, "interrupt": -signal.SIGINT, "exception": 1}
AT_ONCE = 6  # more than there are cores, so that a thread may be stopped at any place
TIMEOUT_S = 300.0
LIMIT_S = 600.0

Call = Callable[[], object]
Calls = dict[str, Callable[[Any, Any], list[Call]]]


def ranks_of(make: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2)))


def open_unisono() -> list[Any]:
    store = dist.HashStore()
    limit = timedelta(seconds=TIMEOUT_S)
    return ranks_of(lambda rank: ProcessGroupUnisono(store, rank, 2, limit, "world"))


def open_gloo() -> list[Any]:
    store = un.HashStore(TIMEOUT_S)
    return ranks_of(
        lambda rank: un.init_process_group(
            backend="gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT_S
        )
    )


def ones(numel: int = 10) -> Any:
    return torch.ones(numel)


def floats(numel: int = 10) -> Any:
    return np.ones(numel, np.float32)


def with_callback(work: Any) -> Any:
    return work, work.get_future().then(lambda future: future.value())


UNISONO: Calls = {
    "calls": lambda one, two: [  # every way to wait; nobody answers
        lambda: one.allreduce([ones()]).wait(),
        lambda: two.recv([ones()], 0, 5).wait(),
        lambda: with_callback(one.broadcast([ones()], 1))[1].wait(),
        lambda: two.recv_anysource([ones()], 9).wait(),
    ],
    "busy": lambda one, two: [
        lambda: one.allreduce([ones()]).wait(),
        lambda: two.allreduce([ones()]).wait(),
        lambda: one.recv([ones()], 1, 7).wait(),
        lambda: with_callback(two.send([ones()], 0, 7))[1].wait(),
    ],
    "pending": lambda one, two: [
        *[lambda: with_callback(one.allreduce([ones(1000)]))] * 5,
        lambda: one.recv([ones()], 1, 7),
        lambda: with_callback(two.send([ones(1_000_000)], 0, 8)),
    ],
}
GLOO: Calls = {
    "calls": lambda one, two: [
        lambda: one.all_reduce(floats()),
        lambda: two.recv(floats(), 0, 5),
        lambda: one.irecv(floats(), 1, 7).wait(),
        lambda: one.recv_object(1, 11),
    ],
    "busy": lambda one, two: [
        lambda: one.all_reduce(floats()),
        lambda: two.all_reduce(floats()),
        lambda: one.recv(floats(), 1, 7),
        lambda: two.send(floats(), 0, 7),
    ],
    "pending": lambda one, two: [
        *[lambda: one.all_reduce(floats(1000), async_op=True)] * 5,
        lambda: one.irecv(floats(), 1, 7),
        lambda: two.isend(floats(1_000_000), 0, 8),
    ],
}
BACKENDS: dict[str, tuple[Callable[[], list[Any]], Calls]] = {
    "unisono": (open_unisono, UNISONO),
    "gloo": (open_gloo, GLOO),
}


def goes_on(calls: list[Call], chance: random.Random) -> None:
    """Daemon threads that make one call each, again and again."""

    def repeat(call: Call) -> None:
        while True:
            try:
                call()
            except (un.UnisonoError, RuntimeError):
                time.sleep(0)

    for call in calls:
        threading.Thread(target=repeat, args=(call,), daemon=True).start()
    time.sleep(0.02 * chance.random())


def reconfigure(groups: list[Any], state: str) -> None:
    """Make the groups anew; "unconnected": one of them, which waits for the other when this process ends."""
    handles = [group.get_reconfigure_handle() for group in groups]
    options = ReconfigureOptions(1, handles, timedelta(seconds=TIMEOUT_S))
    if state == "reconfigured":
        ranks_of(lambda rank: groups[rank].reconfigure(options).wait())
    else:
        threading.Thread(target=groups[0].reconfigure, args=(options,), daemon=True).start()


kept: list[object] = []  # until the interpreter ends


def enter(state: str, backend: str, chance: random.Random) -> None:
    """Bring a new group into this state."""
    make, calls = BACKENDS[backend]
    one, two = groups = make()
    if state in ("calls", "failed"):
        goes_on(calls["calls"](one, two), chance)
    if state == "failed":  # Gloo cannot abort; when a rank closes, the other one's calls fail
        (one.close if backend == "gloo" else one.abort)()
        time.sleep(0.02 * chance.random())
    if state in CHANGED:
        reconfigure(groups, state)
    if state == "busy" or state in CHANGED:
        goes_on(calls["busy"](one, two), chance)
    if state == "closed":
        goes_on(calls["calls"](two, one)[:1], chance)
        (one.close if backend == "gloo" else one.shutdown)()
    if state in ("pending", "dropped"):
        kept.extend(call() for call in calls["pending"](one, two))
    if state != "dropped":
        kept.append(groups)
        return
    del groups, one, two
    if chance.random() < 0.5:
        gc.collect()
    if chance.random() < 0.5:
        kept.clear()


def end(ending: str) -> None:
    """End this process, or return to the end of the program."""
    if ending == "exit":
        sys.exit()
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    if ending == "exception":
        raise SystemError("this ends the program")


Case = tuple[str, str, str, int]  # backend, state, ending, seed
Running = dict[int, tuple[Case, float, int]]  # by pid; since when; a descriptor of its stderr


def started(cases: Iterator[Case], running: Running) -> Case | None:
    """Fork a process for each case that has room; in such a process, return its case."""
    for case in itertools.islice(cases, AT_ONCE - len(running)):
        said = os.memfd_create("stderr")
        pid = os.fork()
        if pid == 0:
            os.dup2(said, 2)
            return case
        running[pid] = (case, time.monotonic(), said)
    return None


def ended(running: Running) -> Iterator[str]:
    """Wait for processes that have ended, and yield what went wrong."""
    time.sleep(0.005)
    for pid, (case, begun, said) in list(running.items()):
        late = time.monotonic() - begun > LIMIT_S
        if late:
            os.kill(pid, signal.SIGABRT)
        gone, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if not gone:
            continue
        del running[pid]
        code = os.waitstatus_to_exitcode(status)
        text = os.pread(said, os.fstat(said).st_size, 0).decode(errors="replace")
        os.close(said)
        if late or code != ENDINGS[case[2]]:
            yield f"{' '.join(map(str, case))}: {code}{', late' if late else ''}\n{text[-3000:]}"


def main() -> None:
    rounds, *backends = sys.argv[1:]
    begins = [
        (backend, state)
        for backend in backends or BACKENDS
        for state in (*STATES, *(CHANGED if backend == "unisono" else ()))
    ]
    cases = [(*begin, *rest) for begin, *rest in crossed(begins, [*ENDINGS], range(int(rounds)))]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    gc.freeze()  # at their end processes need not look through all that PyTorch has made
    running: Running = {}
    waiting, wrong = iter(cases), 0
    left = len(cases)
    while left:
        case = started(waiting, running)
        if case is not None:
            backend, state, ending, seed = case
            enter(state, backend, random.Random(seed))
            end(ending)
            return
        before = len(running)
        for text in ended(running):
            wrong += 1
            print(text, flush=True)
        left -= before - len(running)
    print(f"{wrong} of {len(cases)} ended otherwise")


main()
