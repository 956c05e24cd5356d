"""Ranks of a queue that die, are stopped or stand still: `queue_losses.py MODE`. See the test."""

import contextlib
import os
import select
import signal
import sys
import threading
import time

import numpy as np
from queue_ranks import ROOM, failing, message, same

import unisono as un
from unisono import Group


def dead_reader(group: Group) -> None:
    """Rank 1 dies; the writer learns it once, within some milliseconds, and goes on with the others."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 1:
        queue.get()
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        pid = group._planner.engine.record_of(1).pid  # type: ignore[attr-defined]
        queue.put(0)
        select.select([os.pidfd_open(pid)], [], [])
        began, number, errors = time.monotonic(), 1, []
        while number <= 200:
            try:
                queue.put([number, "x" * 1000], timeout=20)
                number += 1
            except un.PeerLost as error:
                errors.append((error.rank, error.pid == pid, time.monotonic() < began + 5))
            time.sleep(0.001)
        print(errors)
    else:
        queue.get()
        assert [queue.get()[0] for _ in range(200)] == list(range(1, 201))
        print("all")
    queue.close()
    os._exit(0)  # the group has lost a rank


def dead_holder(group: Group) -> None:
    """Rank 1 dies while the writer waits for it, in a queue that is full."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 1:
        kept = queue.get()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL if kept is not None else 0)
    if group.rank == 0:
        queue.put(np.zeros(ROOM // 16))
        number = 0
        lost = ""
        while number < 20:
            try:
                queue.put(np.full(ROOM // 16, number), timeout=20)
                number += 1
            except un.PeerLost as error:
                lost = f"lost rank {error.rank}"
        print(lost)
    else:
        queue.get()
        assert [int(queue.get()[0]) for _ in range(20)] == list(range(20))
        print("all")
    queue.close()
    os._exit(0)


def dead_relay(group: Group) -> None:
    """Rank 2 dies, which passes messages on to rank 3: both others learn it, and rank 1 reads on."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 2:
        queue.get()
        os.kill(os.getpid(), signal.SIGKILL)
    lost = []
    for number in range(299 if group.rank else 300):  # one is not put
        try:
            queue.put([number, "x" * 1000], timeout=20) if group.rank == 0 else queue.get(timeout=20)
            time.sleep(0 if group.rank else 0.002 if number != 200 or lost else 1)  # on a busy machine
        except un.PeerLost as error:
            lost.append(f"{error.rank} {'passes it on' in str(error)}")
            if group.rank == 3:
                break
    print(lost, flush=True)
    queue.close()
    os._exit(0)


def dead_writer(group: Group) -> None:
    """Rank 0 dies; the readers get what it has put, and then its name."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 0:
        for i in range(5):
            queue.put([i])
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    assert [queue.get() for _ in range(5)] == [[i] for i in range(5)]
    while (found := failing(lambda: queue.get(timeout=20))) == "no error":
        pass
    print(found.partition(" (pid")[0] if "(pid" in found else found, flush=True)
    time.sleep(0.3)
    os._exit(0)


def struck_writer(group: Group) -> None:
    """Rank 0 dies at any moment; what it had put comes, each message once, whole, and nothing else."""
    queue = group.queue(bytes=ROOM)
    note = group.broadcast_object(None if group.rank else os.open(os.curdir, os.O_TMPFILE | os.O_RDWR))
    note = os.open(f"/proc/{group._planner.engine.record_of(0).pid}/fd/{note}", os.O_RDWR)  # type: ignore[attr-defined]
    group.barrier()
    if group.rank == 0:
        threading.Timer(
            float(np.random.default_rng().uniform(0, 0.3)), os.kill, (os.getpid(), signal.SIGKILL)
        ).start()
        for i in range(1, 1 << 40):
            queue.put(message(i))
            os.pwrite(note, i.to_bytes(8, "little"), 0)
    count = 0
    try:
        while True:
            assert same(queue.get(timeout=20), message(count + 1)), count
            count += 1
    except un.PeerLost as error:
        put = int.from_bytes(os.pread(note, 8, 0), "little")
        print(f"lost {error.rank}, {'all' if put <= count <= put + 1 else (put, count)}", flush=True)
    time.sleep(0.3)
    os._exit(0)


def stopped(group: Group) -> None:
    """Rank 1 is stopped; the writer's Timeout names it. It goes on, and everything comes."""
    queue = group.queue(bytes=ROOM)
    pid = group._planner.engine.record_of(1).pid  # type: ignore[attr-defined]
    if group.rank == 0:
        os.kill(pid, signal.SIGSTOP)
        for i in range(100):
            try:
                queue.put(np.full(1000, i), timeout=0.7)
            except un.Timeout as error:
                print(str(error).replace(str(pid), "PID"), flush=True)
                os.kill(pid, signal.SIGCONT)
                queue.put(np.full(1000, i), timeout=20)
        group.barrier()
    else:
        assert [int(queue.get()[0]) for _ in range(100)] == list(range(100))
        group.barrier()
        print("all")
    queue.close()


def standing(group: Group) -> None:
    """Rank 1 computes for long; the writer's Timeout names its line."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 1:
        kept = queue.get()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            sum(range(1000))  # HERE
        assert (kept == 0).all()
        del kept
        for _ in queue:
            pass
    elif group.rank == 0:
        queue.put(np.zeros(1000))
        print(failing(lambda: [queue.put(np.zeros(1000), timeout=1) for _ in range(5000)]))
        queue.close()
    else:
        for _ in queue:
            pass
    group.barrier()


def survives(group: Group) -> None:
    """A queue goes on when its group has lost a rank that was not in it, and in the next group."""
    queue = group.queue(0, [1, 2], bytes=ROOM)
    if group.rank == 3:
        os._exit(1)
    with contextlib.suppress(un.PeerLost):
        group.barrier()
    for turn in range(2):
        if group.rank == 0:
            for i in range(100):
                queue.put([turn, i, "x" * 2000], timeout=20)
        else:
            assert [queue.get(timeout=20)[:2] for _ in range(100)] == [[turn, i] for i in range(100)]
        group = group if turn else group.shrink()
    group.barrier()
    print("goes on")
    os._exit(0)


if __name__ == "__main__":
    with un.init_process_group() as world:
        globals()[sys.argv[1]](world)
