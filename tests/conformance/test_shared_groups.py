"""Several threads use one group at the same time. On a Python without a GIL they really do.

The threads of a rank run the same calls in any order, so that any order in which they come agrees.
"""

import contextlib
import gc
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, times
from loops import each
from python_runs import ran

PROGRAMS = Path(__file__).resolve().parent / "programs"
THREADS = 4
ROUNDS = times(40, 1000, 10)
BIG = 100_000  # elements: a call of so many lets go of the GIL
REFUSED = (ValueError, TypeError)
ENDED = (un.GroupClosed, un.Aborted, un.PeerLost)


@pytest.fixture(autouse=True)
def switching_often():
    """Also with a GIL the threads take turns within a call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all at once; the results, or the first error."""
    start = threading.Barrier(len(works))

    def one(work: Callable[[], Any]) -> Any:
        start.wait(HANG_S)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


def crowd(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(number)` in THREADS threads at once."""
    return together(*(lambda number=number: work(number) for number in range(THREADS)))


def alone() -> un.Group:
    return un.init_process_group(store=un.HashStore(), rank=0, world_size=1)


def test_the_gil_stays_off() -> None:
    """Importing and using Unisono turns no GIL on."""
    said = ran(PROGRAMS / "says_whether_there_is_a_gil.py")
    expected = "no GIL" if sysconfig.get_config_var("Py_GIL_DISABLED") else "GIL"
    assert (said.stdout.strip(), said.stderr) == (expected, "")


def test_new_calls_while_others_are_repeated() -> None:
    """Each thread has more calls than a group remembers, so that every slot changes hands."""

    def work(number: int) -> None:
        for size in range(1, ROUNDS * 4):
            x = np.full(size, number, np.int32)
            assert group.all_reduce(x) is None
            assert (x == number).all()
            assert group.all_reduce(number + 0.5) == number + 0.5
            made = group.all_gather(x)
            assert made.shape == (1, size)
            assert (made == number).all()
            group.all_reduce_coalesced([x, np.ones(size), np.ones(BIG)])
            assert group.all_gather_object(size) == [size]

    with alone() as group:
        crowd(work)


# Each is one operation of the engine: those of several could mix in another order on each rank.
CALLS: dict[str, Callable[[un.Group, np.ndarray], Any]] = {
    "in place": lambda group, x: group.all_reduce(x),
    "large": lambda group, x: group.all_reduce(np.ones(BIG)),
    "asynchronous": lambda group, x: group.all_reduce(x, async_op=True).wait(),
    "allocated": lambda group, x: x.__setitem__(slice(None), group.all_gather(x).sum(axis=0)),
    "into a list": lambda group, x: group.all_gather([np.empty(8) for _ in range(group.size)], x),
    "many": lambda group, x: group.all_reduce_coalesced([x, np.ones(9)]),
    "many, asynchronous": lambda group, x: group.all_reduce_coalesced([x, np.ones(9)], async_op=True).wait(),
    "a number": lambda group, x: x.fill(group.all_reduce(1.0)),
    "a name": lambda group, x: group.all_reduce(x, algorithm="ring", timeout=HANG_S),
    "barrier": lambda group, x: group.barrier(),
}


@each(("name", "call"), CALLS.items())
def test_the_same_calls_from_all_threads(name: str, call: Callable[..., Any]) -> None:
    def work(group: un.Group) -> None:
        def many(_: int) -> None:
            for _ in range(ROUNDS):
                x = np.ones(8)
                call(group, x)
                assert x[0] in (1, group.size), name
                assert (x == x[0]).all(), name

        crowd(many)

    ranks.threads(2, work)


@each("numel", [1, BIG])
def test_messages_of_many_threads(numel: int) -> None:
    """Each thread has a tag of its own, on which its messages keep their order."""

    def work(group: un.Group) -> None:
        peer = 1 - group.rank

        def pairs(tag: int) -> None:
            y = np.empty(numel)
            for number in range(ROUNDS):
                sent = group.isend(np.full(numel, number + tag / 10), peer, tag)
                status = group.recv(y, peer, tag)
                sent.wait()
                assert (status.source, status.tag, status.numel) == (peer, tag, numel)
                assert (y == number + tag / 10).all()

        def later(tag: int) -> None:
            for number in range(ROUNDS):
                coming = [(group.irecv(y := np.empty(numel), peer, tag), y) for _ in range(3)]
                for place in range(3):
                    group.send(np.full(numel, number * 3.0 + place), peer, tag)
                for place, (one, y) in enumerate(coming):
                    one.wait()
                    assert (y == number * 3 + place).all()

        def objects(tag: int) -> None:
            for number in range(ROUNDS):
                group.send_object({"number": number, "tag": tag}, peer, tag)
                assert group.recv_object(peer, tag) == {"number": number, "tag": tag}

        together(
            lambda: pairs(1), lambda: pairs(2), lambda: later(3), lambda: later(4), lambda: objects(5),
            lambda: objects(6),
        )  # fmt: skip

    ranks.threads(2, work)


def test_receives_are_cancelled_while_messages_arrive() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank

        def cancels(tag: int) -> None:
            for _ in range(ROUNDS):
                never = group.irecv(np.empty(4), peer, tag)
                assert never.cancel()
                assert never.cancelled
                never.wait()

        def perhaps() -> None:
            """One of two threads cancels, the other one may be faster and receive."""
            for _ in range(ROUNDS):
                one = group.irecv(np.empty(1), peer, 3)
                sent = group.isend(np.ones(1), peer, 3)
                together(one.cancel, one.done)
                if one.cancelled:
                    group.recv(np.empty(1), peer, 3)
                one.wait()
                sent.wait()

        together(lambda: cancels(1), lambda: cancels(2), perhaps)

    ranks.threads(2, work)


def test_all_threads_ask_the_same_work() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        for _ in range(ROUNDS):
            works = [
                group.all_reduce(np.ones(BIG), async_op=True),
                group.all_gather(np.ones(3), async_op=True),
                group.isend(np.ones(3), peer),
                group.irecv(np.ones(3), peer),
            ]
            for one in works:
                asked = together(one.done, one.exception, one.wait, one.result, lambda one=one: repr(one))
                assert asked[1:3] == [None, None]
                assert one.done()
            un.wait_all(works)

    ranks.threads(2, work)


def test_asynchronous_calls_have_their_own_numbers() -> None:
    def work(_: int) -> list[int]:
        works = [group.all_reduce(np.ones(4), async_op=True) for _ in range(ROUNDS)]
        un.wait_all(works)
        return [one.number for one in works]

    with alone() as group:
        numbers = [number for some in crowd(work) for number in some]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_lists_that_another_thread_changes() -> None:
    """A call reads a list of buffers as it is at some moment, or refuses it."""
    stop = threading.Event()
    xs = [np.ones(4) for _ in range(8)]

    def changes() -> None:
        while not stop.is_set():
            for _ in range(8):
                xs.pop()
            xs.extend(np.ones(4) for _ in range(8))

    def calls() -> None:
        try:
            for _ in range(ROUNDS * 20):
                for call in (group.all_reduce_coalesced, lambda some: group.all_gather(some, np.ones(4))):
                    with contextlib.suppress(*REFUSED):
                        call(xs)
                with contextlib.suppress(*REFUSED):
                    group.all_reduce_coalesced(xs, async_op=True).wait()
        finally:
            stop.set()

    with alone() as group:
        together(changes, calls)


def test_settings_change_between_calls() -> None:
    """Setting a timeout forgets all remembered calls, while other threads repeat them."""
    stop = threading.Event()

    def changes() -> None:
        for number in range(ROUNDS * 5):
            group.timeout_s = 30 + number % 2
            group.reproducible = bool(number % 2)
            group.link_bytes_per_s = 1e9 + number
        stop.set()

    def calls() -> None:
        while not stop.is_set():
            x = np.ones(8)
            group.all_reduce(x)
            group.all_reduce_coalesced([x, x.copy()])
            assert group.all_reduce(3) == 3
            assert (x == 1).all()

    with alone() as group:
        together(changes, calls, calls)


@each("last", ["close", "abort"])
def test_a_thread_ends_the_group_that_others_use(last: str) -> None:
    """Each call of the others ends well, or with an error that says so."""

    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        under_way = threading.Event()

        def until_the_end(call: Callable[[], Any]) -> None:
            try:
                with contextlib.suppress(*ENDED):
                    while True:
                        call()
                        under_way.set()
            finally:  # the other rank may be the first to end
                under_way.set()

        def posts_and_cancels() -> None:
            one = group.irecv(np.ones(8), peer, 5)
            if not one.cancel():
                one.wait()

        def ends() -> None:
            under_way.wait(HANG_S)
            with contextlib.suppress(*ENDED):
                getattr(group, last)()

        together(
            ends,
            lambda: until_the_end(lambda: group.all_reduce(np.ones(8))),
            lambda: until_the_end(lambda: group.all_reduce(np.ones(8), async_op=True).wait()),
            lambda: until_the_end(lambda: group.recv(np.ones(8), peer)),
            lambda: until_the_end(lambda: group.send(np.ones(8), peer)),
            lambda: until_the_end(posts_and_cancels),
        )
        group.close()

    for _ in range(times(5, 50, 2)):
        ranks.threads(2, work)


def test_groups_are_made_and_forgotten_by_all_threads() -> None:
    def work(number: int) -> None:
        for _ in range(times(10, 200, 3)):
            group = alone()
            group.all_reduce_coalesced([np.ones(4), np.ones(5)], async_op=True).wait()
            assert group.all_reduce(number) == number
            if number % 2:
                group.close()
            del group
            if number == 0:
                gc.collect()

    crowd(work)
