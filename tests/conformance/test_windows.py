"""One-sided communication: random programs against a sequential model, errors, locks, threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
import window_model
from effort import HANG_S, times

SPREADS = [(2, 2), (3, 3), (4, 2), (3, 1), (2, 1)]


@pytest.mark.parametrize(("size", "per_host"), SPREADS)
@pytest.mark.parametrize("make", [un.empty, np.empty], ids=["mapped", "ordinary"])
def test_random_programs_give_what_the_model_gives(size: int, per_host: int, make: Any) -> None:
    def work(group: un.Group) -> None:
        for seed in range(times(6, 200)):
            window_model.run(group, 1000 * size + seed, 5, make)

    ranks.threads(size, work, per_host=per_host)


def test_ranks_that_share_no_memory_connect_within_a_host() -> None:
    def work(group: un.Group) -> None:
        window_model.run(group, 77, 4, np.empty)

    ranks.threads(2, work, per_host=2)
    with pytest.raises(un.UnisonoError, match="no store"):
        ranks.threads(2, work, zero_copy=False)  # groups of this kind have no store in which to meet


def test_several_threads_may_end_a_window_and_its_group() -> None:
    # Two joined one thread of the window.
    def work(group: un.Group) -> None:
        windows = [group.window(np.zeros(1)) for _ in range(4)]
        ends = [window.end for window in windows for _ in range(3)]
        with ThreadPoolExecutor(len(ends)) as pool:
            for each in [pool.submit(end) for end in ends]:
                each.result()

    ranks.threads(2, work, per_host=1)


def test_the_end_of_a_group_is_that_of_all_its_queues() -> None:
    # The first one left the list of what ends with the group while that was walked: the next one stayed open.
    def work(group: un.Group) -> None:
        queues = [group.queue(bytes=1 << 12) for _ in range(3)]
        group.barrier()
        group.close()
        for queue in queues:
            with pytest.raises(un.GroupClosed, match="has closed the queue"):
                queue.get() if group.rank else queue.put(1)

    ranks.threads(2, work, per_host=2)


@pytest.mark.parametrize("per_host", [3, 1])
def test_wrong_arguments_are_errors_before_a_byte_moves(per_host: int) -> None:
    def work(group: un.Group) -> None:
        array = np.arange(4.0)
        with group.window(array if group.rank < 2 else None) as window:
            one = np.ones(1)
            wrong: list[tuple[type[Exception], str, Any]] = [
                (ValueError, "not in the array", lambda: window.put(np.ones(5), 1)),
                (ValueError, "not in the array", lambda: window.put(one, 1, 4)),
                (ValueError, "not in the array", lambda: window.get(one, 1, -1)),
                (ValueError, "not in the array", lambda: window.accumulate(one, 1, 1 << 62)),
                (ValueError, "is not in this window", lambda: window.put(one, 3)),
                (ValueError, "is not in this window", lambda: window.flush(-1)),
                (ValueError, "exposes no array", lambda: window.put(one, 2)),
                (ValueError, "exposes no array", lambda: window.fetch_and_op(1, 2)),
                (TypeError, "int32, the array of rank 1 is float64", lambda: window.put(np.ones(1, "i4"), 1)),
                (TypeError, "NoneType", lambda: window.put(None, 1)),
                (ValueError, "contiguous", lambda: window.get(np.ones(4)[::2], 1)),
                (ValueError, "read-only|writ", lambda: window.get(np.broadcast_to(one, 1), 1)),
                (ValueError, "op is", lambda: window.accumulate(one, 1, op=un.ReduceOp.AVG)),
                (ValueError, "op is", lambda: window.accumulate(one, 1, op="sum")),
                (ValueError, "combine", lambda: window.accumulate(one, 1, op=un.ReduceOp.BAND)),
                (TypeError, "no number", lambda: window.fetch_and_op("1", 1)),
                (TypeError, "no number", lambda: window.fetch_and_op(1j, 1)),
                (ValueError, "one element", lambda: window.compare_and_swap(np.ones(2), np.ones(2), 1)),
                (TypeError, "integer", lambda: window.put(one, "1")),
            ]
            for kind, text, call in wrong:
                with pytest.raises(kind, match=text):
                    call()
            window.fence()
            assert array.tolist() == [0, 1, 2, 3]
            window.fence()
            window.put(one, 1, 3)
            window.fence()
            assert array[3] == (1 if group.rank == 1 else 3)
        with pytest.raises(un.UnisonoError):
            window.put(one, 1)

    ranks.threads(3, work, per_host=per_host)


def test_a_window_needs_memory_that_others_may_change() -> None:
    def work(group: un.Group) -> None:
        for array, kind in ((np.ones(4)[::2], ValueError), (b"ab", ValueError), (3, TypeError)):
            with pytest.raises(kind):
                group.window(array)

    ranks.threads(1, work)


@pytest.mark.parametrize("per_host", [3, 1])
def test_posts_and_starts_order_calls_of_some_ranks(per_host: int) -> None:
    """A ring: each rank lets its left neighbour write, and writes to its right one."""

    def work(group: un.Group) -> None:
        left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        array = np.zeros(3, np.int64)
        with group.window(array) as window:
            for turn in range(20):
                window.post([left])
                window.start([right])
                window.put(np.full(3, 100 * turn + group.rank), right)
                window.complete([right])
                if turn % 2:
                    window.wait([left])
                else:
                    while not window.test([left]):
                        time.sleep(0)
                assert array.tolist() == [100 * turn + left] * 3

    ranks.threads(3, work, per_host=per_host)


@pytest.mark.parametrize("per_host", [3, 1])
def test_threads_of_several_ranks_take_each_ticket_once(per_host: int) -> None:
    each, threads = times(200, 5000), 3

    def work(group: un.Group) -> list[int]:
        with group.window(un.empty(1, np.int64) if group.rank == 0 else None) as window:
            if group.rank == 0:
                window.put(np.zeros(1, np.int64), 0)
            window.fence()
            with ThreadPoolExecutor(threads) as pool:
                taken = pool.map(lambda _: [window.fetch_and_op(1, 0) for _ in range(each)], range(threads))
            return [ticket for some in taken for ticket in some]

    found = ranks.threads(2, work, per_host=per_host)
    assert sorted(ticket for some in found for ticket in some) == list(range(2 * threads * each))


@pytest.mark.parametrize("per_host", [3, 1])
def test_a_lock_excludes_all_that_do_not_share_it(per_host: int) -> None:
    inside, most = [0, 0], [0, 0]  # alone, together
    mutex = threading.Lock()

    def work(group: un.Group) -> None:
        with group.window(np.zeros(1)) as window:
            for turn in range(30):
                shared = (turn + group.rank) % 3 > 0
                with window.lock(1, shared):
                    with mutex:
                        inside[shared] += 1
                        most[shared] = max(most[shared], inside[shared])
                        assert inside[0] == 0 or inside == [1, 0]
                    time.sleep(0.001)
                    with mutex:
                        inside[shared] -= 1
            window.fence()
            with window.lock(shared=True):
                window.fence()

    ranks.threads(3, work, per_host=per_host)
    assert most[0] == 1
    assert most[1] > 1


@pytest.mark.parametrize("per_host", [3, 1])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("lock", "rank 0 has the lock"),
        ("fence", "rank 1 has not called fence"),
        ("start", "rank 1 has not called post"),
        ("wait", "rank 1 has not called complete"),
    ],
)
def test_a_timeout_names_whom_it_waited_for(per_host: int, what: str, text: str) -> None:
    ready = threading.Barrier(2)

    def work(group: un.Group) -> str:
        window = group.window(np.zeros(1))
        held = window.lock(1)  # without this name it would be given back
        if what == "lock" and group.rank == 0:
            held.__enter__()
        if what == "wait" and group.rank == 0:
            window.post([1])
        ready.wait(HANG_S)
        caller = 1 if what == "lock" else 0
        error = ""
        if group.rank == caller:
            calls = {
                "lock": lambda: window.lock(1, timeout=0.2).__enter__(),
                "fence": lambda: window.fence(timeout=0.2),
                "start": lambda: window.start([1], timeout=0.2),
                "wait": lambda: window.wait([1], timeout=0.2),
            }
            with pytest.raises(un.Timeout) as caught:
                calls[what]()
            error = str(caught.value)
        ready.wait(HANG_S)
        with pytest.raises(un.Timeout):
            window.fence()
        return error

    assert text in "".join(ranks.threads(2, work, per_host=per_host))


def test_a_rank_that_wants_the_lock_alone_gets_it_from_a_crowd() -> None:
    done = threading.Event()

    def work(group: un.Group) -> int:
        turns = 0
        with group.window(np.zeros(1)) as window:
            if group.rank == 0:
                time.sleep(0.05)
                with window.lock(1, timeout=60):
                    pass
                done.set()
            while not done.is_set():
                turns += 1
                with window.lock(1, shared=True):
                    time.sleep(0.002)
        return turns

    assert min(ranks.threads(3, work, per_host=3)[1:]) > 5


def test_closing_the_group_ends_a_call_that_waits() -> None:
    def work(group: un.Group) -> None:
        window = group.window(np.zeros(1))
        if group.rank == 1:
            time.sleep(0.3)
            return
        threading.Timer(0.1, group.close).start()
        with pytest.raises(un.UnisonoError, match="has closed the window or its group"):
            window.start([1])

    ranks.threads(2, work, per_host=2)
