"""More of a group's life: handlers that close, threads that share, errors that nobody waits for."""

import contextlib
import gc
import os
import threading
import time
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from effort import HANG_S, judge_time
from unisono.engine.operations import functions

PROGRAMS = Path(__file__).resolve().parent / "programs"


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_close_in_a_signal_handler_ends_the_call_it_interrupts(call: str) -> None:
    told = ranks.processes(2, PROGRAMS / "closes_in_a_handler.py", call)
    # The latter where the machine is busy, and the call came after the signal.
    assert told[0].split() in (["Aborted", "True"], ["GroupClosed", "True"])
    assert "rank 0" in told[1]


def test_close_in_a_signal_handler_does_not_wait_for_calls_behind_the_one_it_interrupts() -> None:
    told = ranks.processes(2, PROGRAMS / "closes_in_a_handler_before_others.py")
    assert told[0].split() == ["ended", "ended"]


def test_a_call_that_was_checked_when_the_group_closed_is_not_remembered() -> None:
    def work(group: un.Group) -> None:
        planner = inside.planner(group)
        prepare = planner.prepare

        def close_behind(*arguments: Any) -> Any:
            prepared = prepare(*arguments)
            group.close()
            return prepared

        planner.prepare = close_behind
        x = np.ones(1)
        for _ in range(2):
            with pytest.raises(un.GroupClosed):
                group.all_reduce(x)

    ranks.threads(1, work)


def test_a_forks_child_cannot_wait_for_what_its_parent_began() -> None:
    told = ranks.processes(2, PROGRAMS / "waits_in_a_forks_child.py")
    lines = told[0].splitlines()
    refused = [line for line in lines if line.startswith("this group belongs to process")]
    assert len(refused) == 3, lines  # newer Pythons also warn of forks of processes with threads
    assert lines[-1] == "got 7.0"


@pytest.mark.parametrize("call", ["recv", "all_reduce", "wait"])
def test_close_in_a_signal_handler_does_not_wait_for_the_call_it_interrupts(call: str) -> None:
    told = ranks.processes(2, PROGRAMS / "closes_in_a_handler_soon.py", call)
    assert told[0].strip() == "at once"


def test_exception_on_one_rank_ends_the_others_at_once() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 1:
            with pytest.raises(ZeroDivisionError), group:
                raise ZeroDivisionError
            return
        started = time.monotonic()
        with pytest.raises(un.PeerLost, match="rank 1 .* has closed the group"):
            group.all_reduce(np.ones(3))
        judge_time(time.monotonic() - started, 5)

    ranks.threads(3, work)


def test_group_that_is_forgotten_is_closed() -> None:
    def work(group: un.Group) -> None:
        inner = group.subgroup([0, 1])
        assert inner is not None
        if group.rank == 0:
            del inner
            gc.collect()
        else:
            with pytest.raises(un.PeerLost, match="rank 0 .* has closed the group"):
                inner.recv(np.zeros(1), 0)
            inner.close()
        group.barrier()

    ranks.threads(2, work)


def test_group_that_is_forgotten_lives_on_in_the_call_of_a_thread() -> None:
    forgotten = threading.Event()

    def work(world: un.Group) -> None:
        inner = world.subgroup([0, 1])
        assert inner is not None
        if world.rank == 0:
            x = np.ones(3)
            thread = threading.Thread(target=inner.all_reduce, args=(x,))
            thread.start()
            del inner
            gc.collect()
            forgotten.set()
            thread.join()
            assert (x == 2).all()
        else:
            assert forgotten.wait(HANG_S)
            inner.all_reduce(np.ones(3))
            with pytest.raises(un.PeerLost, match="rank 0 .* has closed the group"):
                inner.recv(np.zeros(1), 0)
            inner.close()

    ranks.threads(2, work)


def test_threads_of_one_group_take_turns() -> None:
    """Each thread's calls are the same on every rank and alike, so that any order they come in agrees."""

    def work(group: un.Group) -> None:
        def many(_: int) -> bool:
            x = np.empty(1000)
            for number in range(50):
                x[:] = number
                group.all_reduce(x, un.MAX)
                if x.max() > 49 or x.min() < 0 or (x != x[0]).any():
                    return False
            return True

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(many, range(3)))
        assert group.sequence == 150

    ranks.threads(2, work)


def test_threads_of_several_groups_do_not_wait_for_each_other() -> None:
    def work(world: un.Group) -> None:
        groups = [world.subgroup(range(world.size)) for _ in range(3)]
        order = groups if world.rank else groups[::-1]

        def many(group: un.Group | None) -> None:
            assert group is not None
            for number in range(30):
                x = np.full(2000, number)
                group.all_reduce(x)
                assert (x == number * world.size).all()
            group.close()

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(many, order))

    ranks.threads(2, work)


def test_error_nobody_waited_for_is_raised_by_the_next_call() -> None:
    def work(group: un.Group) -> None:
        if group.rank:
            group.all_reduce(np.ones(2), async_op=True)
        else:
            group.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(un.Mismatch, match="ranks called different things"):
            for _ in range(10_000):
                group.barrier()
        with pytest.raises(un.Mismatch):
            group.send(np.ones(1), 1 - group.rank)

    ranks.threads(2, work)


def test_error_nobody_heard_of_is_raised_at_the_end_of_the_block() -> None:
    """Also without a next call; but neither a second time, nor in the place of another error."""

    def differ(group: un.Group) -> un.Work | None:
        work = group.all_reduce(np.ones(2 + group.rank), async_op=True)
        end = time.monotonic() + 60
        while work is not None and not work.done() and time.monotonic() < end:
            time.sleep(0.001)
        return work

    def forgets(group: un.Group) -> None:
        with pytest.raises(un.Mismatch), group:
            differ(group)

    def hears(group: un.Group) -> None:
        with group:
            work = differ(group)
            assert work is not None
            with pytest.raises(un.Mismatch):
                work.wait()

    def fails(group: un.Group) -> None:
        with pytest.raises(KeyError), group:
            differ(group)
            raise KeyError("its own")

    for one in (forgets, hears, fails):
        ranks.threads(2, one)


def test_message_nobody_waited_for_is_raised_by_the_next_call() -> None:
    def work(group: un.Group) -> None:
        if group.rank:
            group.isend(np.ones(2, np.float32), 0)
        else:
            group.irecv(np.ones(3), 1)
        with pytest.raises(un.Mismatch, match=r"got float32\[2\], expected float64\[3\]"):
            for _ in range(10_000):
                group.barrier()
                time.sleep(0.0001)

    ranks.threads(2, work)


def test_a_receive_that_has_ended_keeps_its_buffer_until_its_caller_knows() -> None:
    def work(group: un.Group) -> None:
        received = np.empty(1)
        buffer = weakref.ref(received)
        ended = group.irecv(received, 0)
        del received
        group.send(np.ones(1), 0)
        later = group.irecv(np.empty(1), 0)  # the group drops works that have ended
        gc.collect()
        assert buffer() is not None, "another array may have its address, and is refused"
        ended.wait()
        gc.collect()
        assert buffer() is None
        assert later.cancel()

    ranks.threads(1, work)


def test_sequence_counts_what_was_issued() -> None:
    def work(group: un.Group) -> None:
        assert group.sequence == 0
        group.barrier()
        works = [group.barrier(async_op=True) for _ in range(3)]
        assert group.sequence == 4
        with pytest.raises(ValueError, match="all_reduce: x is not contiguous"):
            group.all_reduce(memoryview(bytearray(8))[::2])
        assert group.sequence == 4
        for one in works:
            assert one is not None
            one.wait()
        group.sendrecv(np.ones(1), 1 - group.rank, np.ones(1), 1 - group.rank)
        assert group.sequence == 4
        group.barrier()
        group.close()
        with pytest.raises(un.GroupClosed):
            _ = group.sequence

    ranks.threads(2, work)


def test_works_say_what_they_are() -> None:
    def work(group: un.Group) -> None:
        release = threading.Event()
        if group.rank == 0:
            reducing = group.all_reduce(np.ones(1), async_op=True)
            receiving = group.irecv(np.ones(1), 1)
            assert repr(reducing) == "<Work all_reduce, queued as 1 of group 'test': under way>"
            assert repr(receiving) == "<Work irecv, rank 1 of group 'test': under way>"
            group.send(np.ones(1), 1)
            assert reducing is not None
            reducing.wait()
            receiving.wait()
            assert repr(reducing).endswith(": done>")
            assert repr(receiving).endswith(": done>")
            late = group.barrier(async_op=True)
            group.abort()
            assert late is not None
            with pytest.raises(un.Aborted):
                late.wait()
            assert repr(late).endswith(": failed (Aborted)>")
        else:
            group.recv(np.ones(1), 0)
            group.all_reduce(np.ones(1))
            group.send(np.ones(1), 0)
        release.set()

    ranks.threads(2, work)


def test_a_call_that_closing_overtakes_does_not_succeed() -> None:
    """One rank closes from another thread: of two calls under way the second may end without having run."""

    def work(world: un.Group) -> None:
        for number in range(40):
            group = world.subgroup([0, 1])
            assert group is not None
            x, y = np.ones(1 << 16, np.float32), np.ones(4, np.float32)
            works = [group.all_reduce(x, async_op=True), group.all_reduce(y, async_op=True)]
            closing = threading.Timer(number * 1e-5, group.close)
            if group.rank == 0:
                closing.start()
            for one, buffer in zip(works, (x, y), strict=True):
                with contextlib.suppress(un.UnisonoError):
                    one.wait()
                    assert buffer[0] == 2
            if group.rank == 0:
                closing.join()
            group.close()
            world.barrier()

    ranks.threads(2, work)


def test_who_closes_after_a_wait_takes_no_data_from_the_others() -> None:
    """On one core, the thread that ends the call is often stopped before it lets go of the group."""

    def work(group: un.Group) -> None:
        for _ in range(100):
            world = group.subgroup([0, 1])
            assert world is not None
            with world:
                xs = [np.full(2000, group.rank + 1.0, np.float32) for _ in range(30)]
                if group.rank == 1:
                    time.sleep(0.002)
                broadcasting = world.broadcast_coalesced(xs, 0, async_op=True)
                assert broadcasting is not None
                broadcasting.wait(HANG_S)
                assert all((x == 1).all() for x in xs)
            group.barrier()

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        ranks.threads(2, work)
    finally:
        os.sched_setaffinity(0, cores)


def test_threads_that_share_an_operation_share_what_the_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine of each rank refers to it without a count: a second one in its place was a crash.
    op, both = un.op(lambda a, b: a + b), threading.Barrier(2)
    make = functions._Fold

    def together(*args: Any) -> Any:
        both.wait(20)
        return make(*args)

    monkeypatch.setattr(functions, "_Fold", together)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: op.combiner(np.dtype("f8"), 1, str), range(2)))
    assert made[0] is made[1]


def test_a_function_that_keeps_its_arrays_is_named() -> None:
    # They lie in memory of the engine: a look at one after the call was a crash.
    kept: list[Any] = []

    def keeps(a: Any, b: Any) -> Any:
        kept.append(b)
        return a + b

    def work(group: un.Group) -> None:
        with pytest.raises(un.Aborted, match="keeps keeps an array that it was given"):
            group.all_reduce(np.ones(8), un.op(keeps))

    ranks.threads(2, work)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_function_raises_may_have_any_text_and_holds_no_array(kind: type[BaseException]) -> None:
    # A surrogate in it was a crash, as was a debugger that shows the arrays of its frames.
    def fails(a: Any, b: Any) -> Any:
        raise kind("\udcff")

    unnamed = types.FunctionType(
        fails.__code__.replace(co_filename="\udcff.py"), {}, "f", None, fails.__closure__
    )
    op = un.op(unnamed)

    def work(group: un.Group) -> None:
        with pytest.raises(un.Aborted, match=f"because of {kind.__name__}"):
            group.all_reduce(np.ones(8), op, async_op=True).wait()

    ranks.threads(2, work)
    assert op.raised is not None
    assert all("b" not in frame.f_locals for frame, _ in traceback.walk_tb(op.raised.__traceback__))
