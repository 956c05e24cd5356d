"""Asynchronous calls: Work, futures, order."""

import math
import mmap
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from unisono.torch.completed_work import DONE
from unisono.torch_internals.version_names import all_gather_single, reduce_scatter_single

SEEN = mmap.mmap(-1, mmap.PAGESIZE)  # shared by the ranks, which are forks of one Python


def check_work(rank, size):
    x = torch.full((5,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    work.synchronize()
    assert torch.equal(x, torch.full((5,), float(sum(range(size)))))


def check_asynchronous_calls_that_are_remembered(rank, size):
    """Those go to the engine by themselves, and are what the first one was."""
    x, out, blocks = torch.empty(4), torch.empty(size, 4), torch.empty(size, 4)
    pg = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.AllreduceOptions()
    options.asyncOp = True
    ranks = torch.arange(float(size))[:, None].expand(size, 4)
    for _ in range(3):
        work = pg.allreduce([x.fill_(rank)], options)
        assert work.result()[0] is x
        assert x.tolist() == [sum(range(size))] * 4
        dist.broadcast(x.fill_(rank), size - 1, async_op=True).wait()
        assert x.tolist() == [size - 1] * 4
        dist.reduce(x.fill_(rank + 1), size - 1, dist.ReduceOp.PRODUCT, async_op=True).wait()
        if rank == size - 1:
            assert x.tolist() == [math.factorial(size)] * 4
        work = all_gather_single(out, x.fill_(rank), async_op=True)
        assert work.result()[0] is out
        assert torch.equal(out, ranks)
        reduce_scatter_single(x, blocks.copy_(ranks), async_op=True).wait()
        assert x.tolist() == [rank * size] * 4
        dist.all_to_all_single(out, blocks.fill_(rank), async_op=True).wait()
        assert torch.equal(out, ranks)
        assert dist.barrier(async_op=True).get_future().wait() == []


def check_is_completed_becomes_true_without_a_wait(rank, size):
    x = torch.ones(4, 4).t()[::2]
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(x, torch.full((2, 4), float(size)))  # copied back although nobody waited


def check_many_in_flight(rank, size):
    xs = [torch.full((n * 100,), float(rank + n)) for n in range(50)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.barrier()
    for work in reversed(works):
        work.wait(timedelta(seconds=300))
    assert all(torch.equal(x, torch.full_like(x, sum(r + n for r in range(size)))) for n, x in enumerate(xs))


def check_nobody_keeps_the_work(rank, size):
    x = torch.ones(100_000)
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.all_reduce(x)
    assert x[0] == size


def check_future(rank, size):
    x = torch.ones(5)
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.wait()[0] is x
    assert future.done()
    doubled = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((5,), 2.0 * size))


def check_futures_complete_in_order(rank, size):
    order = []
    futures = []
    for n in range(20):
        future = dist.all_reduce(torch.ones(1000 * (20 - n)), async_op=True).get_future()
        futures.append(future.then(lambda _, n=n: order.append(n)))
    torch.futures.wait_all(futures)
    assert sorted(order) == list(range(20))


def check_future_of_a_complete_work(rank, size):
    work = dist.all_reduce(torch.ones(5), async_op=True)
    work.wait()
    assert work.get_future().done()


def check_a_receive_does_not_hold_up_the_futures(rank, size):
    late = torch.zeros(1)
    received = dist.irecv(late, (rank - 1) % size).get_future()
    dist.all_reduce(torch.ones(5), async_op=True).get_future().wait()
    dist.send(torch.ones(1), (rank + 1) % size) if size > 1 else None
    received.wait()
    assert late.item() == 1


def check_every_collective_asynchronously(rank, size):
    rows, x, many = torch.zeros(size, 2), torch.ones(2), [torch.ones(2) for _ in range(size)]
    works = [
        dist.broadcast(x, 0, async_op=True),
        dist.reduce(x.clone(), 0, async_op=True),
        dist.all_gather(list(rows.unbind()), x, async_op=True),
        all_gather_single(rows, x, async_op=True),
        dist.gather(x, many if rank == 0 else None, 0, async_op=True),
        dist.scatter(x, many if rank == 0 else None, 0, async_op=True),
        dist.reduce_scatter(x, many, async_op=True),
        reduce_scatter_single(torch.zeros(2), rows, async_op=True),
        dist.all_to_all(list(torch.zeros(size, 2).unbind()), many, async_op=True),
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
        assert work.is_success()
    assert torch.equal(rows, torch.ones(size, 2))
    assert x[0] == size


def check_the_profiler_sees_collectives(rank, size):
    with torch.profiler.profile() as seen:
        dist.all_reduce(torch.ones(5))
        dist.broadcast(torch.ones(5), 0, async_op=True).wait()
    names = [event.name for event in seen.events()]
    assert names.count("unisono:all_reduce") == 1
    assert names.count("unisono:broadcast") == 1


def check_repr(rank, size):
    work = dist.all_reduce(torch.ones(3, 4), async_op=True)
    assert repr(work) in ("<UnisonoWork: under way, float32[3, 4]>", "<UnisonoWork: complete, float32[3, 4]>")
    work.wait()
    assert "complete" in repr(work)
    assert repr(DONE) == "<Work: complete when it was made>"


def check_a_wait_that_gives_up_can_be_repeated(rank, size):
    x = torch.full((5,), float(rank))
    if rank == 0:  # comes last, when all others have given up once
        for other in range(1, size):
            dist.recv(torch.empty(1), other)
        dist.all_reduce(x)
    else:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=20))
        assert not work.is_completed()
        assert work.exception() is None
        dist.send(torch.ones(1), 0)
        assert work.wait(timedelta(seconds=300))
    assert torch.equal(x, torch.full((5,), float(sum(range(size)))))


def check_what_a_callback_raises_reaches_who_waits(rank, size):
    def refuse(future):
        raise ValueError("not today")

    future = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(refuse)
    with pytest.raises(RuntimeError, match="not today"):
        future.wait()
    with pytest.raises(RuntimeError, match="not today"):
        future.then(lambda future: future.value()).wait()
    dist.all_reduce(torch.ones(5))  # the group is as good as before


def check_works_go_on_while_python_is_busy(rank, size):
    """No thread of rank 0 gets the GIL, and yet its part of what it has begun is done."""
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    futures = [work.get_future() for work in works]
    interval, deadline = sys.getswitchinterval(), time.monotonic() + 20
    if rank == 0:
        sys.setswitchinterval(100)
        try:
            while sum(SEEN[1:size]) < size - 1 and time.monotonic() < deadline:
                pass
        finally:
            sys.setswitchinterval(interval)
    for work in works:
        work.wait()
    SEEN[rank] = 1
    assert rank or sum(SEEN[1:size]) == size - 1
    torch.futures.wait_all(futures)


def check_a_message_fills_its_tensor(rank, size):
    """As in Gloo a shorter one is no message for it. In a group of its own, which it ends."""
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(2), 1, group=pair)
    elif rank == 1:
        try:
            dist.recv(torch.zeros(3), 0, group=pair)
        except Exception as error:
            assert "float32[2], expected float32[3]" in str(error), error
        else:
            raise AssertionError("a shorter message was taken")


def check_exchange_in_place(rank, size):
    """The peer's numbers, whatever the size and the strides; ValueError, if the receive is called first."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for n in (3, 5000, 200_000):
        for strided in (False, True):
            x = torch.full((n, 2), float(rank))[:, 0] if strided else torch.full((n,), float(rank))
            batch = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, x, left)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            assert (x == left).all()
    for large in (False, True):  # the receive may have ended, but the caller does not know it
        x = torch.zeros(200_000 if large else 3)
        dist.barrier()
        sent = dist.isend(torch.full_like(x, rank), right)
        received = dist.irecv(x, left)
        try:
            dist.isend(x, right, tag=1)
        except ValueError as error:
            assert "shares memory" in str(error)
        else:
            raise AssertionError("a send of what is being received")
        sent.wait()
        received.wait()
        assert (x == left).all()
        again = dist.isend(x, right, tag=2)
        dist.recv(torch.zeros_like(x), left, tag=2)
        again.wait()
