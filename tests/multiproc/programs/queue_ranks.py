"""Ranks of a queue: `queue_ranks.py MODE`. The test says what each mode must print, or how it must end."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as un
from unisono import Group
from unisono.engine.encoding import encode
from unisono.engine.windows import queue_opening

ROOM = 1 << 16


def message(number: int, seed: int = 0) -> Any:
    """Message `number`: nothing, an object of plain types, one array, or arrays in an object."""
    random = np.random.default_rng((seed, number))
    size = int(random.choice([0, 1, 7, 500, 4095, 4096, 9000, 20000]))
    kind = number % 4
    array = random.integers(0, 255, size // (2 if kind == 3 else 1), np.uint8)
    if kind == 0:
        return [number, None]
    if kind == 1:
        return {"number": number, "text": "x" * size}
    if kind == 2:
        return array
    return {"number": number, "arrays": [array, array[::-1].astype(np.float32)[: size // 16]]}


def same(found: Any, expected: Any) -> bool:
    """Whether they are equal, dtypes and shapes included."""
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def every(group: Group) -> None:
    """Each reader gets every message in order, though one is slow and one keeps arrays for a while."""
    number = 400
    with group.queue(bytes=ROOM * 2) as queue:
        if group.rank == 0:
            for i in range(number):
                queue.put(message(i))
            print("put")
            return
        kept: list[tuple[int, Any]] = []
        count = 0
        for got in queue:
            assert same(got, message(count)), count
            if group.rank == 1 and count % 40 == 0:
                time.sleep(0.01)
            if group.rank == 2 and count % 3 == 0:
                kept = [*kept[-1:], (count, got)]
            for i, each in kept:
                assert same(each, message(i)), i
            count += 1
        print(count)


def apart(group: Group) -> None:
    """The same where the system refuses to open another process's memory, as a sandbox does."""
    opened = queue_opening._mapped
    queue_opening._mapped = lambda pid, *rest: opened(pid, *rest) if pid == os.getpid() else None
    every(group)


def latest(group: Group) -> None:
    """A strictly newer whole message each time; the writer waits for nobody. The last one comes."""
    queue = group.queue(bytes=ROOM * 8, keep="latest")
    if group.rank == 0:
        for i in range(1, 2001):
            queue.put(np.full(1000, i), timeout=5)
            if i % 100 == 0:
                time.sleep(0.002)
        print("put")
    else:
        last, kept = 0, []
        while last < 2000:
            got = queue.get()
            number = int(got[0])
            assert (got == number).all(), "a torn message"
            assert number > last, (number, last)
            last = number
            kept = [*kept[-1:], (number, got)]
            assert all((array == i).all() for i, array in kept), "changed while it was used"
            if group.rank == 1:
                time.sleep(0.001)
        print(last)
    group.barrier()
    queue.close()


def holding(group: Group) -> None:
    """With keep="latest" a reader that keeps one array, and never asks again, stops nobody."""
    queue = group.queue(bytes=ROOM, keep="latest")
    if group.rank == 0:
        queue.put(np.full(1000, 1))
        group.barrier()
        for i in range(3000):
            queue.put(np.full(1000, i), timeout=1)
        group.barrier()
        return
    got = queue.get()
    group.barrier()
    group.barrier()
    print((got == 1).all())


def crowded(group: Group) -> None:
    """With keep="latest" a message that does not fit beside the newest one takes its place."""
    queue = group.queue(bytes=ROOM, keep="latest")
    large = ROOM - 200
    if group.rank == 0:
        for nbytes in (100, large, large, 100, large):
            queue.put(np.full(nbytes, 1, np.uint8), timeout=2)
        group.barrier()
        group.barrier()
        print(failing(lambda: queue.put(np.full(large, 2, np.uint8), timeout=0.1))[:28])
        group.barrier()
        group.barrier()
        queue.put(np.full(large, 3, np.uint8), timeout=5)
        return
    group.barrier()
    got = queue.get(timeout=5)
    sizes = [got.size]
    group.barrier()
    group.barrier()
    sizes.append(int(got.sum()))
    del got
    group.barrier()
    print([ROOM - large, *sizes, int(queue.get(timeout=5)[0])])


def sizes(group: Group) -> None:
    """A message as large as the queue passes, a larger one is refused before a byte moves."""
    queue = group.queue(bytes=ROOM)
    frame = len(encode(np.zeros(5000, np.uint8))) - 5000
    for nbytes in (0, 1, 5000, ROOM - frame, 0, ROOM - frame):
        if group.rank == 0:
            queue.put(np.full(nbytes, 7, np.uint8), timeout=20)
        else:
            got = queue.get(timeout=20)
            assert got.size == nbytes and (got == 7).all()
            del got
    if group.rank == 0:
        try:
            queue.put(np.zeros(ROOM))
        except ValueError as error:
            print(error)
        queue.put("next")
    else:
        print(queue.get())
    group.barrier()


def kept(group: Group) -> None:
    """A reader keeps one array of every 300 messages, and reads many more than a queue has records."""
    number = 3000
    queue = group.queue(bytes=ROOM * 2)
    if group.rank == 0:
        for i in range(number):
            queue.put(np.full(600, i) if i % 300 == 0 else i, timeout=20)
        group.barrier()
        return
    found = [queue.get(timeout=20) for _ in range(number)]
    kept = found[::300]
    print([np.unique(array).tolist() for array in kept] == [[i] for i in range(0, number, 300)], end=" ")
    del found[::300]
    print(found == [i for i in range(number) if i % 300])
    group.barrier()


def joins(group: Group) -> None:
    """Rank 2 joins late, leaves, and joins again."""
    queue = group.queue(bytes=ROOM, join=group.rank != 2)
    for turn in range(3):
        if turn == 1 and group.rank == 2:
            queue.join()
        group.barrier()
        if group.rank == 0:
            for i in range(200):
                queue.put((turn, i, b"x" * 500), timeout=20)
        elif group.rank == 1 or turn == 1:
            found = [queue.get()[:2]]
            while found[0][0] != turn:  # on its way between hosts, when this rank joined
                found = [queue.get()[:2]]
            found += [queue.get()[:2] for _ in range(199)]
            assert found == [(turn, i) for i in range(200)]
        group.barrier()
        if turn == 1 and group.rank == 2:
            queue.leave()
    if group.rank == 2:
        queue.join()
    group.barrier()
    if group.rank == 0:
        queue.put("last")
    else:
        while (found := queue.get()) != "last":
            assert found[0] == 2
        print(found)
    group.barrier()


def left(group: Group) -> None:
    """`leave` ends a call of another thread; its arrays stay; the writer does not wait any more."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 0:
        queue.put(np.full(1000, 5))
        group.barrier()
        for i in range(500):
            queue.put(np.full(1000, i), timeout=20)
        group.barrier()
        return
    kept = queue.get()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(failing(queue.get)))
    thread.start()
    time.sleep(0.2)
    queue.leave()
    thread.join()
    group.barrier()
    group.barrier()
    print(found, (kept == 5).all(), failing(queue.get))


def failing(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        return f"no error: {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def threads(group: Group) -> None:
    """Three threads put, three get: each message goes to one thread of each reader. Another one watches."""
    number = 3000
    queue = group.queue(bytes=ROOM)
    found: list[Any] = []

    def put(first: int) -> None:
        for i in range(first, number, 3):
            queue.put([i, np.full(600, i)])

    def get() -> None:
        for i, array in queue:
            assert (array == i).all()
            found.append(i)

    workers = [
        threading.Thread(target=put, args=(i,)) if group.rank == 0 else threading.Thread(target=get)
        for i in range(3)
    ]
    for each in workers:
        each.start()
    while group.rank == 0 and any(map(threading.Thread.is_alive, workers)):
        queue.slowest()
    for each in workers:
        each.join()
    queue.close()
    print("put" if group.rank == 0 else sorted(found) == list(range(number)))


def two(group: Group) -> None:
    """Two queues in opposite directions, and one between some ranks."""
    there, back = group.queue(0, [1], bytes=ROOM), group.queue(1, [0], bytes=ROOM)
    for i in range(200):
        if group.rank == 0:
            there.put(i)
            assert back.get() == i + 1
        elif group.rank == 1:
            back.put(there.get() + 1)
    group.barrier()
    print(failing(there.get) if group.rank != 1 else "read")


def closed(group: Group) -> None:
    """Messages of a writer that has ended its process are still read."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 0:
        for i in range(20):
            queue.put([i, "x" * 100])
        queue.close()
        print(failing(lambda: queue.put(1)))
        return
    time.sleep(0.5)
    print([got[0] for got in queue] == list(range(20)), failing(queue.get))


def wrong(group: Group) -> None:
    """Wrong arguments fail on every rank, before a byte moves."""
    for arguments in (
        {"keep": "some"},
        {"bytes": 100},
        {"writer": 9},
        {"readers": [0]},
        {"readers": [1, 1]},
        {"spin_s": -1},
        {"bytes": ROOM << group.rank},
        {"keep": "all" if group.rank else "none"},
    ):
        print(failing(lambda given=arguments: group.queue(**given)))  # type: ignore[misc]
    queue = group.queue(bytes=ROOM)
    print(failing(lambda: queue.put(object())) if group.rank == 0 else failing(lambda: queue.get(timeout=-1)))
    print(failing(lambda: queue.get(timeout=0)) if group.rank else failing(queue.get))
    group.barrier()


def forked(group: Group) -> None:
    """A forked child that drops a message's array does not free the parent's."""
    queue = group.queue(bytes=ROOM)
    if group.rank == 0:
        queue.put(np.full(1000, 3))
        group.barrier()
        for i in range(6):
            queue.put(np.full(1000, i))
        group.barrier()
        return
    kept = queue.get()
    child = os.fork()
    if child == 0:
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    group.barrier()
    group.barrier()
    print((kept == 3).all())


def inherited(group: Group) -> None:
    """What a forked child does with a queue that it has inherited changes nothing for the ranks."""
    queue = group.queue(bytes=ROOM)
    for name in ("leave", "join", "close", "put", "get"):
        child = os.fork()
        if child == 0:
            failing(lambda name=name: getattr(queue, name)(*[1] * (name == "put")))  # type: ignore[misc]
            os._exit(0)
        os.waitpid(child, 0)
    group.barrier()
    if group.rank == 0:
        queue.put("still here", timeout=5)
    else:
        print(queue.get(timeout=5))
    group.barrier()


if __name__ == "__main__":
    with un.init_process_group() as world:
        for mode in sys.argv[1:]:
            print(f"mode {mode}", flush=True)
            globals()[mode](world)
            world.barrier()
