"""Two ranks over Gloo: messages that are polled, waits that run out of time, forks, and a close too early."""

import contextlib
import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import unisono as un

world = un.init_process_group("gloo", timeout=300)
other = 1 - world.rank

# a message is done when it has come, whoever asks
work = world.irecv(np.zeros(3), other)
world.send(np.ones(3), other)
end = time.monotonic() + 10
while not work.done():
    assert time.monotonic() < end
    time.sleep(0.001)
world.barrier()
x = np.zeros(3)
world.send(np.ones(3), other)
world.recv(x, other, timeout=300)
assert x.sum() == 3

# a wait that runs out of time is a Timeout, and what comes later finds its buffer, though nobody holds it
try:
    world.recv(np.zeros(1 << 18), other, 1, timeout=0.05)
except un.Timeout:
    pass
else:
    raise AssertionError("no Timeout")
world.irecv(np.zeros(1 << 18), other, 2)
gc.collect()
fresh = [np.zeros(1 << 18) for _ in range(4)]
world.barrier()
world.send(np.ones(1 << 18), other, 1)
world.send(np.ones(1 << 18), other, 2)
world.barrier()
assert not any(one.any() for one in fresh)


# objects of several threads to one rank and tag stay whole; an array is no object
def send_objects(thread: int) -> None:
    for number in range(10):
        world.send_object((thread, number, "x" * thread * 1000), other, 5, timeout=300)


with ThreadPoolExecutor(8) as pool:
    sent = [pool.submit(send_objects, thread) for thread in range(4)]
    received = [pool.submit(world.recv_object, other, 5, timeout=300) for _ in range(40)]
    found = sorted(one.result() for one in received)
    assert [one.result() for one in sent] == [None] * 4
assert found == [(thread, number, "x" * thread * 1000) for thread in range(4) for number in range(10)]
world.send(np.array([16, 16]), other, 6)
try:
    world.recv_object(other, 6)
except un.Mismatch as error:
    assert f"rank {other} sent a message that is no object, tag 6" in str(error)
else:
    raise AssertionError("no Mismatch")

# a fork's child has no part in the group, and may end
child = os.fork()
if child == 0:
    try:
        world.barrier()
    except RuntimeError as error:
        world.close()
        del world
        gc.collect()
        os._exit(0 if "belongs to process" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
world.all_reduce(np.ones(3))

# one rank closes while the other has not yet come
if world.rank == 0:
    world.all_reduce(np.ones(1 << 18), async_op=True)
    world.close()
else:
    time.sleep(1.2)
    with contextlib.suppress(un.GroupError):
        world.all_reduce(np.ones(1 << 18))
    world.close()
