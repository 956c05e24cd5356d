"""Ranks of a `MessageQueue`, as serving programs use it: `message_queue_ranks.py MODE`."""

import random
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from unisono.torch.message_queue import MessageQueue

CHUNK = 40 * 1024


def arrays(number: int, seed: int) -> list[np.ndarray]:
    """Arrays of 8 to 80,000 bytes: half of them are larger than a chunk."""
    random = np.random.default_rng(seed)
    return [random.integers(1, 100, random.integers(1, 10_000)) for _ in range(number)]


def broadcast(group: object, rank: int) -> None:
    """All objects reach all readers in order, and stay as they are after the room was used again."""
    writer = 2
    queue = MessageQueue.create_from_process_group(group, CHUNK, 2, writer)
    queue.wait_until_ready()
    kept = []
    for each in arrays(500, 7):
        found = queue.broadcast_object(each if rank == writer else None)
        assert np.array_equal(found, each)
        assert found.flags.writeable
        kept.append(found)
        time.sleep(random.random() / 2000)
    assert all(map(np.array_equal, kept, arrays(500, 7)))
    print("equal")
    queue.wait_until_ready()


def shutdown(group: object, rank: int) -> None:
    """A reader that is idle times out, and is cancelled by another thread."""
    queue = MessageQueue.create_from_process_group(group, CHUNK, 2, 0)
    found = []
    if rank != 0:
        try:
            queue.dequeue(timeout=0.001)
        except TimeoutError:
            found.append("timeout")
        threading.Timer(0.2, queue.shutdown).start()
        try:
            queue.dequeue(timeout=20)
        except RuntimeError as error:
            found.append(str(error).partition(":")[0])
        assert queue.shutting_down
    queue.wait_until_ready()
    print(found)


def wakes(group: object, rank: int) -> None:
    """A reader that sleeps without a timeout wakes; one that raises while it reads gives its room back."""
    queue = MessageQueue.create_from_process_group(group, CHUNK, 2, 0, pickle=True)
    queue.wait_until_ready()
    if rank == 0:
        time.sleep(0.5)
        queue.enqueue({"tensor": torch.arange(5000), "set": {1}, "call": random.random})
        for _ in range(2000):
            queue.enqueue(np.zeros(9000), timeout=20)
    else:
        found = queue.dequeue(indefinite=True)
        assert torch.equal(found["tensor"], torch.arange(5000))
        for _ in range(2000):
            try:
                with queue.acquire_read(timeout=20) as data:
                    assert data.nbytes > 72000
                    raise ZeroDivisionError
            except ZeroDivisionError:
                del data
    queue.wait_until_ready()
    print("read")


def refuses(group: object, rank: int) -> None:
    """Each side has its calls; a writer that waits for a reader that stands still times out, and names it."""
    queue = MessageQueue.create_from_process_group(group, 32 << 20, 2, 0)
    try:
        queue.dequeue() if rank == 0 else queue.enqueue(1)
    except AssertionError as error:
        print(error)
    if rank == 0:
        queue.enqueue(np.zeros(5 << 20))
        try:
            queue.enqueue(np.zeros(5 << 20), timeout=0.1)
        except TimeoutError as error:
            assert "has not taken message 1" in str(error)
    queue.wait_until_ready()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.group.WORLD, dist.get_rank())
    dist.destroy_process_group()
