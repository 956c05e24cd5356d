"""Ranks that die, never come, leave or are interrupted: every other one is told, soon and by name."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from effort import HANG_S, cases, crossed
from launching import wait_until
from loops import SPREADS, everywhere, of_two
from python_runs import PATH, fine
from unisono import _native

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(("size", "rounds"), cases([(4, 5)], long=[(2, 20), (4, 20)]))
def test_sigkill_of_any_rank_at_any_moment_is_named_within_a_second(size: int, rounds: int) -> None:
    printed = fine(HERE / "kill_program.py", rounds, size, time.time_ns() % 1000, **PATH)
    summary = json.loads(printed.splitlines()[-1])
    assert (summary["rounds"], summary["failed"]) == (rounds, 0)


@everywhere
def test_rank_that_never_calls_is_named_in_the_timeout() -> None:
    told: dict[int, str] = {}
    release = threading.Event()

    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 2:
            release.wait(HANG_S)
            return
        with pytest.raises(un.Timeout) as caught:
            group.all_reduce(np.ones(4), timeout=1)
        told[group.rank] = str(caught.value)
        if len(told) == 3:
            release.set()

    ranks.threads(4, work)
    assert set(told) == {0, 1, 3}
    for text in told.values():
        assert "rank 2 never arrived" in text
        assert "last seen after barrier #1" in text
        assert "all_reduce timed out" in text


@everywhere
def test_timeout_is_kept() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            started = time.monotonic()
            with pytest.raises(un.Timeout, match=r"after 0\.3 s"):
                group.barrier(timeout=0.3)
            assert time.monotonic() - started > 0.29
            release.set()
        else:
            release.wait(HANG_S)  # a rank that left would be the answer

    ranks.threads(2, work)


@everywhere
def test_timeout_of_a_receive_names_its_sender() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(un.Timeout, match="rank 1 did not answer"):
                group.recv(np.zeros(1), 1, timeout=0.3)
            release.set()
        else:
            release.wait(HANG_S)

    ranks.threads(2, work)


@everywhere
def test_timeout_of_a_receive_is_told_to_all_with_its_tag() -> None:
    def work(group: un.Group) -> None:
        x = np.zeros(1)
        if group.rank == 1:
            with pytest.raises(
                un.Timeout, match=r"recv\(tag=4\) timed out after 0\.3 s: rank 0 did not answer"
            ):
                group.recv(x, 0, 4, timeout=0.3)
        else:
            with pytest.raises(un.Timeout, match="barrier failed: a send or receive of rank 1 timed out"):
                group.barrier()

    ranks.threads(3, work)


@everywhere
def test_timeout_of_a_receive_lists_what_waits_for_another_one() -> None:
    """At most four messages, in the order they came; the last one came in several parts."""
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            release.wait(HANG_S)
            return
        if group.rank == 2:
            sent = [(np.ones(3), 7), (np.ones(2, np.int32), 8), (np.ones(0), 9), (np.ones(50_000), 10)]
            for x, tag in [*sent, (np.ones(1), 11), (np.ones(1), 12)]:
                group.isend(x, 1, tag)
            group.send(np.ones(1), 1, 1)
            release.wait(HANG_S)
            return
        group.recv(np.zeros(1), 2, 1)  # now the others have come
        late = group.irecv(np.zeros(1), 0, 3)
        with pytest.raises(un.Timeout, match=r"it continues.*: unexpected messages: from rank 2 with tag 7"):
            late.wait(0.05)
        with pytest.raises(un.Timeout) as caught:
            group.recv(np.zeros(3), 0, 4, timeout=0.3)
        release.set()
        assert (
            "unexpected messages: "
            "from rank 2 with tag 7, float64[3] (24 bytes); from rank 2 with tag 8, int32[2] (8 bytes); "
            "from rank 2 with tag 9, float64[0] (0 bytes); "
            "from rank 2 with tag 10, float64[50000] (400000 bytes); and 2 more. Compare the tags"
        ) in str(caught.value)

    ranks.threads(3, work)


@everywhere
def test_a_message_that_is_still_arriving_is_no_unexpected_one() -> None:
    """Its header came before its receive, which then waits for the rest of it in vain."""
    halfway, release = threading.Event(), threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            x = np.ones(4_000_000)
            # As a process that was stopped: as much as finds room, and nobody goes on with it.
            place = 1, 4, 9, x.ctypes.data, x.nbytes, 60.0, True
            send = _native.NativeMessageWork(inside.planner(group), inside.engine(group), "send", *place)
            send.start()
            assert not send.ended()
            halfway.set()
            release.wait(HANG_S)
            group.close()
            return
        halfway.wait(HANG_S)
        late = group.irecv(np.zeros(1), 0, 3)  # takes the header in
        with pytest.raises(un.Timeout, match="it continues") as caught:
            late.wait(0.2)
        with pytest.raises(un.Timeout) as posted:
            group.recv(np.zeros(4_000_000), 0, 4, timeout=0.3)
        release.set()
        assert "have come" not in str(caught.value) + str(posted.value)

    ranks.threads(2, work, per_host=0, zero_copy=False)  # with zero copy it would not need its sender


@everywhere
def test_a_message_from_oneself_that_was_not_sent() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Timeout, match="rank 0 has not sent itself such a message"):
            group.recv(np.zeros(1), group.rank, timeout=0.3)

    ranks.threads(1, work)


@everywhere
def test_waiting_for_a_work_that_is_late_does_not_end_it() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        x = np.ones(3)
        if group.rank:
            release.wait(HANG_S)
        reducing = group.all_reduce(x, async_op=True)
        receiving = group.irecv(y := np.zeros(1), 1 - group.rank)
        assert reducing is not None
        if group.rank == 0:
            with pytest.raises(un.Timeout, match="it continues"):
                reducing.wait(0.05)
            with pytest.raises(un.Timeout, match="it continues"):
                receiving.wait(0.05)
            assert not reducing.done()
            assert reducing.exception() is None
            release.set()
        reducing.wait()
        group.send(np.array([7.0]), 1 - group.rank)
        receiving.wait()
        assert (x == 2).all()
        assert y[0] == 7

    ranks.threads(2, work)


@everywhere
def test_what_was_sent_before_closing_still_arrives() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 1:
            group.broadcast(np.arange(5.0), 1)
            group.send(np.arange(7.0), 0)
            group.close()
            return
        time.sleep(0.1)
        x, y = np.zeros(5), np.zeros(7)
        group.broadcast(x, 1)
        group.recv(y, 1)
        assert (x == np.arange(5)).all()
        assert (y == np.arange(7)).all()

    ranks.threads(2, work)


@everywhere
def test_aborted_group_stays_aborted_and_closes() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            time.sleep(0.1)
            group.abort()
        for _ in range(2):
            with pytest.raises(un.Aborted, match="rank 0 aborted the group"):
                group.all_reduce(np.ones(4))
        with pytest.raises(un.Aborted):
            group.recv(np.zeros(1), 1 - group.rank)

    ranks.threads(2, work)


@everywhere
def test_an_abort_tells_where_it_was_called_or_what_it_was_called_for() -> None:
    def work(group: un.Group, error: Exception | None, told: str) -> None:
        if group.rank == 0:
            try:
                if error is not None:
                    raise error
                group.abort()
            except ValueError:
                group.abort()
        with pytest.raises(un.Aborted, match=f"rank 0 aborted the group because of {told}"):
            group.barrier()

    ranks.threads(2, lambda group: work(group, None, r"a call of abort\(\) at .*test_ranks_that_die.py:\d+"))
    ranks.threads(2, lambda group: work(group, ValueError("bad loss"), "ValueError: bad loss"))


@everywhere
def test_closing_with_work_under_way_ends_it() -> None:
    """Neither rank reads that somebody aborted the group, and the one that closed it not its own number."""
    closed = threading.Event()

    def work(group: un.Group) -> None:
        x = np.ones(4)
        if group.rank == 0:
            reducing = group.all_reduce(x, async_op=True)
            group.close()
            closed.set()
            with pytest.raises(un.Aborted, match="failed: this rank closed the group during the call"):
                reducing.wait()
        else:
            assert closed.wait(HANG_S)
            with pytest.raises(un.PeerLost, match="rank 0 .* has closed the group"):
                group.all_reduce(x)

    ranks.threads(2, work)


@everywhere
def test_a_repeated_call_whose_group_is_closed_meanwhile_says_so() -> None:
    closed = threading.Event()

    def work(group: un.Group) -> None:
        x = np.ones(4)
        for _ in range(2):
            group.all_reduce(x)
        if group.rank == 0:

            def close() -> None:
                wait_until(lambda: group.last_seen(0) == "in all_reduce #3")
                group.close()

            closing = threading.Thread(target=close)
            closing.start()
            with pytest.raises(un.Aborted, match="closed the group during the call"):
                group.all_reduce(x)
            closing.join()
            closed.set()
        else:
            assert closed.wait(HANG_S)
            with pytest.raises(un.GroupError):  # the first has a result if rank 0 had sent before it closed
                for _ in range(2):
                    group.all_reduce(x)

    ranks.threads(2, work)


def interrupted(*cases: tuple[str, str]) -> dict[tuple[str, str], list[str]]:
    """What two ranks printed in each case, a call and what is raised. All at a time: each waits a while."""
    with ThreadPoolExecutor(len(cases)) as pool:
        told = pool.map(lambda case: ranks.processes(2, PROGRAMS / "is_interrupted.py", *case), cases)
        return dict(zip(cases, told, strict=True))


@of_two
def test_ctrl_c_in_a_wait_is_heard() -> None:
    found = interrupted(*((call, "KeyboardInterrupt") for call in ("all_reduce", "recv", "wait")))
    for case, (mine, other) in found.items():
        assert mine.strip() == "interrupted", case
        assert "rank 0 was interrupted (Ctrl-C)" in other, case


@of_two
def test_what_another_signal_handler_raises_is_not_told_as_ctrl_c() -> None:
    told = {
        "ValueError": "because of ValueError: bad loss, which a signal handler raised",
        "SystemExit": "because of SystemExit, which a signal handler raised",
    }
    for (_, raised), (mine, other) in interrupted(*(("barrier", raised) for raised in told)).items():
        assert mine.strip() == "interrupted", raised
        assert f"rank 0 was interrupted {told[raised]}" in other
        assert "Ctrl-C" not in other, raised


@of_two
def test_exit_without_close_leaves_nothing_and_others_are_told() -> None:
    told, _ = ranks.processes(2, PROGRAMS / "ends_without_close.py")
    assert "has closed the group; it was last seen after all_reduce #1" in told


@pytest.mark.needs("other processes")  # no end of a process tells it
@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(
    ("call", "spread"), crossed(["all_reduce", "recv", "recv from any"], [*SPREADS]), indirect=["spread"]
)
def test_a_rank_that_runs_another_program_is_lost_at_once(call: str) -> None:
    assert ranks.processes(3, PROGRAMS / "runs_another_program.py", call) == ["fine\n"] * 3
