"""What happens at the edges of a group's life: closing early, forking, signals, exits, aborts."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from effort import HANG_S, judge_time
from loops import everywhere

PROGRAMS = Path(__file__).resolve().parent / "programs"


@everywhere
def test_closing_with_large_work_in_flight_touches_no_freed_memory() -> None:
    def work(group: un.Group) -> None:
        for _ in range(3):
            group.all_reduce(np.ones(1 << 21, np.float32), async_op=True)
        if group.rank == 0:
            time.sleep(0.002)
        group.close()

    for _ in range(5):
        ranks.threads(2, work)


@pytest.mark.skipif(
    os.environ.get("UNISONO_SANITIZED") == "address",
    reason="ASan's own allocator does not survive a fork while another thread allocates",
)
def test_child_of_a_fork_leaves_the_group_alone() -> None:
    told = ranks.processes(2, PROGRAMS / "forks_and_goes_on.py")
    assert [each.split()[-1] for each in told] == ["2.0", "2.0"]


def test_child_of_a_fork_cannot_use_the_group() -> None:
    told = ranks.processes(2, PROGRAMS / "calls_in_a_forks_child.py")
    assert told[0].count("this group belongs to process") == 2
    assert told[0].count("2.0") == told[1].count("2.0") == 1


@everywhere
def test_rank_that_waits_for_another_blames_nobody_who_has_left() -> None:
    """Rank 1 takes its part and leaves; rank 0's staging memory is full because of rank 2."""

    def work(group: un.Group) -> None:
        if group.rank == 2:
            time.sleep(0.5)
        x = np.full(1 << 20, group.rank, np.float32)
        group.broadcast(x, 0)
        group.gather(np.ones(4), np.empty((3, 4)) if group.rank == 2 else None, 2)
        assert not x.any()
        group.close()

    ranks.threads(3, work)


@everywhere
def test_nothing_is_sent_after_an_abort() -> None:
    both = threading.Barrier(2)

    def work(group: un.Group) -> None:
        group.barrier()
        both.wait(HANG_S)  # an abort also ends what the other one has not finished
        group.abort()
        with pytest.raises(un.Aborted):
            group.send(np.ones(1), 1 - group.rank)
        with pytest.raises(un.Aborted):
            group.isend(np.ones(1), 1 - group.rank).wait()

    ranks.threads(2, work)


@everywhere
def test_abort_in_the_middle_of_a_long_message() -> None:
    def work(group: un.Group) -> None:
        big = np.full(4 << 20, 255, np.uint8)
        with pytest.raises(un.GroupError):
            if group.rank == 0:
                group.send(big, 1)
            else:
                group.irecv(big, 0)
                time.sleep(0.001)
                group.abort()
            group.recv(np.zeros(3), 1 - group.rank)
        with pytest.raises(un.GroupError):
            group.recv(np.zeros(3), 1 - group.rank)

    for _ in range(5):
        ranks.threads(2, work)


def test_wrong_sendrecv_posts_nothing() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        out, x = np.zeros(1), np.zeros(1)
        with pytest.raises(ValueError, match="rank 9"):
            group.sendrecv(np.ones(1), 9, out, peer)
        group.send(np.full(1, 7.0), peer)
        group.recv(x, peer)
        assert (x[0], out[0]) == (7, 0)

    ranks.threads(2, work)


@everywhere
def test_receive_from_anybody_hears_that_all_have_left() -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank:
            group.close()
            return
        started = time.monotonic()
        with pytest.raises(un.PeerLost, match="has closed the group"):
            group.recv(np.zeros(1))
        judge_time(time.monotonic() - started, 5)

    ranks.threads(3, work)


@everywhere
def test_cause_is_still_told_after_close() -> None:
    closed = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            reducing = group.all_reduce(np.ones(1), async_op=True)
            group.close()
            closed.set()
            assert reducing is not None
            assert isinstance(reducing.exception(), un.Aborted)
        else:
            assert closed.wait(HANG_S)
            with pytest.raises(un.GroupError):
                group.all_reduce(np.ones(1))
                group.barrier()

    ranks.threads(2, work)


def test_close_ends_a_call_of_another_thread() -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank:
            time.sleep(0.4)
            return
        told: list[BaseException] = []

        def wait() -> None:
            try:
                group.all_reduce(np.ones(1))
            except un.UnisonoError as error:
                told.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        group.close()
        waiting.join(HANG_S)
        assert not waiting.is_alive()
        assert told

    ranks.threads(2, work)


def test_premultiplied_sums_are_remembered_once() -> None:
    def work(group: un.Group) -> None:
        for factor in range(1, 50):
            x = np.ones(3)
            group.all_reduce(x, un.premul_sum(factor))
            assert (x == 2 * factor).all()
        assert inside.remembered(group) == 1

    ranks.threads(2, work)


def test_numbers_and_bools_are_no_operations() -> None:
    def work(group: un.Group) -> None:
        group.all_reduce(np.ones(2), un.AVG)
        for wrong in (True, 1, 1.0, None):
            with pytest.raises(TypeError, match="expected un.SUM, un.AVG"):
                group.all_reduce(np.ones(2), wrong)  # type: ignore[arg-type]

    ranks.threads(1, work)


def test_outputs_that_overlap_are_refused() -> None:
    def work(group: un.Group) -> None:
        one = np.zeros(4)
        with pytest.raises(ValueError, match="two arrays of out overlap"):
            group.all_gather([one, one], np.ones(4))

    ranks.threads(2, work)


@pytest.mark.parametrize("call", ["barrier", "wait"])
def test_collective_in_a_signal_handler_is_refused(call: str) -> None:
    """Also to wait for one, which comes after the call that the handler interrupts; it is queued then."""
    told = ranks.processes(2, PROGRAMS / "calls_in_a_handler.py", call)
    assert "called from a signal handler" in told[0]
    assert told[0].split()[-1] == "2.0"


def test_exception_of_a_signal_handler_comes_through() -> None:
    told = ranks.processes(2, PROGRAMS / "raises_in_a_handler.py")
    assert "came through" in told[0]
    assert "told" in told[1]


def test_exit_while_a_daemon_thread_waits() -> None:
    ranks.processes(2, PROGRAMS / "ends_while_a_thread_waits.py")
