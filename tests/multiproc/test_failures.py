"""Ranks that die, never come, differ, leave or are interrupted: every other one is told, soon and by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un

pytestmark = pytest.mark.usefixtures("spread")

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(("size", "rounds"), [(2, 5), (4, 10)])
def test_sigkill_of_any_rank_at_any_moment_is_named_within_a_second(size: int, rounds: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [
        sys.executable,
        str(HERE / "kill_program.py"),
        str(rounds),
        str(size),
        str(time.time_ns() % 1000),
    ]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert (summary["rounds"], summary["failed"]) == (rounds, 0)


def test_rank_that_never_calls_is_named_in_the_timeout() -> None:
    told: dict[int, str] = {}
    release = threading.Event()

    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 2:
            release.wait(20)
            return
        with pytest.raises(un.Timeout) as caught:
            group.all_reduce(np.ones(4), timeout=0.4)
        told[group.rank] = str(caught.value)
        if len(told) == 3:
            release.set()

    ranks.threads(4, work)
    assert set(told) == {0, 1, 3}
    for text in told.values():
        assert "rank 2 never arrived" in text
        assert "last seen after barrier #1" in text
        assert "all_reduce timed out" in text


def test_timeout_is_kept() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            started = time.monotonic()
            with pytest.raises(un.Timeout, match=r"after 0\.3 s"):
                group.barrier(timeout=0.3)
            assert 0.29 < time.monotonic() - started < 10
            release.set()
        else:
            release.wait(20)  # a rank that left would be the answer

    ranks.threads(2, work)


def test_timeout_of_a_receive_names_its_sender() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(un.Timeout, match="rank 1 did not answer"):
                group.recv(np.zeros(1), 1, timeout=0.3)
            release.set()
        else:
            release.wait(20)

    ranks.threads(2, work)


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


def test_timeout_of_a_receive_lists_what_waits_for_another_one() -> None:
    """At most four messages, in the order they came, whole or not: the last one is of several parts."""
    release = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 0:
            release.wait(30)
            return
        if group.rank == 2:
            sent = [(np.ones(3), 7), (np.ones(2, np.int32), 8), (np.ones(0), 9), (np.ones(50_000), 10)]
            for x, tag in [*sent, (np.ones(1), 11), (np.ones(1), 12)]:
                group.isend(x, 1, tag)
            group.send(np.ones(1), 1, 1)
            release.wait(30)
            return
        group.recv(np.zeros(1), 2, 1)  # now the others have come
        late = group.irecv(np.zeros(1), 0, 3)
        with pytest.raises(
            un.Timeout, match=r"it goes on.*: messages that have come .* from rank 2 with tag 7"
        ):
            late.wait(0.05)
        with pytest.raises(un.Timeout) as caught:
            group.recv(np.zeros(3), 0, 4, timeout=0.3)
        release.set()
        assert (
            "messages that have come and nobody here has asked for: "
            "from rank 2 with tag 7, float64[3] (24 bytes); from rank 2 with tag 8, int32[2] (8 bytes); "
            "from rank 2 with tag 9, float64[0] (0 bytes); "
            "from rank 2 with tag 10, float64[50000] (400000 bytes); and 2 more. Compare the tags"
        ) in str(caught.value)

    ranks.threads(3, work)


def test_a_message_from_oneself_that_was_not_sent() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Timeout, match="rank 0 has sent itself no such message"):
            group.recv(np.zeros(1), group.rank, timeout=0.3)

    ranks.threads(1, work)


def test_waiting_for_a_work_that_is_late_does_not_end_it() -> None:
    release = threading.Event()

    def work(group: un.Group) -> None:
        x = np.ones(3)
        if group.rank:
            release.wait(20)
        reducing = group.all_reduce(x, async_op=True)
        receiving = group.irecv(y := np.zeros(1), 1 - group.rank)
        assert reducing is not None
        if group.rank == 0:
            with pytest.raises(un.Timeout, match="it goes on"):
                reducing.wait(0.05)
            with pytest.raises(un.Timeout, match="it goes on"):
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


DIFFERENT = {
    "operation": (lambda g: g.all_reduce(np.ones(4)), lambda g: g.broadcast(np.ones(4), 1)),
    "both wait": (lambda g: g.reduce(np.ones(4), 0), lambda g: g.broadcast(np.ones(4), 0)),
    "both receive": (lambda g: g.broadcast(np.ones(4), 1), lambda g: g.broadcast(np.ones(4), 0)),
    "dtype": (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(8, np.float32))),
    "size": (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(5))),
    "large size": (lambda g: g.all_reduce(np.ones(1 << 20)), lambda g: g.all_reduce(np.ones((1 << 20) + 1))),
    "op": (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(4), un.MAX)),
    "order": (
        lambda g: (g.barrier(), g.all_reduce(np.ones(1))),
        lambda g: (g.all_reduce(np.ones(1)), g.barrier()),
    ),
    "algorithm": (
        lambda g: g.all_reduce(np.ones(4), algorithm="ring"),
        lambda g: g.all_reduce(np.ones(4), algorithm="binomial"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_call_different_things_are_all_told_within_a_second(name: str, size: int) -> None:
    usual, odd = DIFFERENT[name]
    told: dict[int, str] = {}

    def work(group: un.Group) -> None:
        group.barrier()
        started = time.monotonic()
        with pytest.raises(un.Mismatch) as caught:
            (odd if group.rank == 1 else usual)(group)
            group.barrier()  # a rank that could finish alone is told in its next call
        assert time.monotonic() - started < 1
        told[group.rank] = str(caught.value)

    ranks.threads(size, work)
    for text in told.values():
        assert "ranks called different things" in text
        assert all(f"rank {rank}  #2" in text for rank in range(size))


def test_ranks_that_could_all_finish_alone_are_told_in_the_next_call() -> None:
    """Rank 0 and rank 6 only send, to each other, and no barrier among nine ever reads those two edges."""

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            group.reduce(np.ones(4), 0) if group.rank == 6 else group.broadcast(np.ones(4), 0)
            for _ in range(3):
                group.barrier()
        assert "rank 0  #1 broadcast(" in str(caught.value)
        assert "rank 6  #1 reduce(" in str(caught.value)

    ranks.threads(9, work)


def test_mismatch_shows_both_calls() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            if group.rank:
                group.all_reduce(np.ones(5, np.float32), un.MAX)
            else:
                group.all_reduce(np.ones(4))
        said = str(caught.value)  # the algorithm is another one between hosts
        assert re.search(r"rank 0  #1 all_reduce\(float64\[4\], SUM, algorithm=\w+\)", said), said
        assert re.search(r"rank 1  #1 all_reduce\(float32\[5\], MAX, algorithm=\w+\)", said), said

    ranks.threads(2, work)


ODD = {
    "operation": (lambda g: g.broadcast(np.ones(4), 0), "rank 1 called broadcast, the others all_reduce ["),
    "size": (lambda g: g.all_reduce(np.ones(5)), "rank 1 called all_reduce with float64[5], the others with"),
    "op": (
        lambda g: g.all_reduce(np.ones(4), un.MAX),
        "rank 1 called all_reduce with MAX, the others with SUM [",
    ),
}


def _others_wait_in_the_first_call(group: un.Group) -> None:
    while any(" #1" not in group.last_seen(rank) for rank in range(group.size) if rank != group.rank):
        time.sleep(0.001)


@pytest.mark.parametrize("name", ODD)
def test_a_mismatch_first_names_the_rank_that_differs_from_most(name: str) -> None:
    odd, said = ODD[name]

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            if group.rank == 1:
                _others_wait_in_the_first_call(group)
                odd(group)
            else:
                group.all_reduce(np.ones(4))
        assert str(caught.value).startswith(f"ranks called different things: {said}")

    ranks.threads(3, work)


BIG = 1 << 20
UNEVEN = {
    "short": (5, 4, "rank 1 sent 5 elements to rank 2, which expected 4 ["),
    "nothing": (0, 4, "rank 1 sent 0 elements to rank 2, which expected 4 ["),
    "long": (BIG, BIG + 5, f"rank 1 sent {BIG} elements to rank 2, which expected {BIG + 5} ["),
    "in parts": (1 << 16, 3, " elements to rank 2, which expected 3 ["),  # between threads: "16384 or more"
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("collective", ["all_to_all", "gather", "scatter"])
def test_a_mismatch_of_sizes_names_the_two_ranks_and_both_sizes(name: str, collective: str) -> None:
    given, wanted, said = UNEVEN[name]

    def all_to_all(group: un.Group) -> None:
        counts = [[2] * 3 for _ in range(3)]
        counts[1][2] = given
        sent = [np.zeros(count) for count in counts[group.rank]]
        counts[1][2] = wanted
        group.all_to_all([np.zeros(counts[source][group.rank]) for source in range(3)], sent)

    def gather(group: un.Group) -> None:
        out = [np.zeros(2), np.zeros(wanted), np.zeros(2)] if group.rank == 2 else None
        group.gather(np.zeros(given if group.rank == 1 else 2), out, 2)

    def scatter(group: un.Group) -> None:
        inputs = [np.zeros(2), np.zeros(2), np.zeros(given)] if group.rank == 1 else None
        group.scatter(np.zeros(wanted if group.rank == 2 else 2), inputs, 1)

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            {"all_to_all": all_to_all, "gather": gather, "scatter": scatter}[collective](group)
            for _ in range(3):
                group.barrier()
        text = str(caught.value)
        assert text.startswith("ranks called different things: rank 1 sent ") and said in text, text
        assert f"rank {group.rank}  #1 {collective}(float64, " in text
        assert "must be of one size" in text

    ranks.threads(3, work)


def test_a_mismatch_of_sizes_in_whole_segments() -> None:
    """Who is sent too much finds out in its next call; who is sent too little, once that call comes."""

    def work(group: un.Group) -> None:
        for given, wanted, said in (
            (2 * BIG, BIG, "rank 0 sent more elements to rank 1 than that expected"),
            (BIG, 2 * BIG, f"rank 0 sent {BIG} elements to rank 1, which expected {2 * BIG}"),
        ):
            inner = group.subgroup(range(2))
            assert inner is not None
            with pytest.raises(un.Mismatch) as caught:
                if group.rank == 0:
                    inner.scatter(np.zeros(BIG), [np.zeros(BIG), np.zeros(given)], 0)
                else:
                    inner.scatter(np.zeros(wanted), None, 0)
                inner.all_reduce(np.ones(1))
                inner.barrier()
            assert str(caught.value).startswith(f"ranks called different things: {said}"), caught.value
            assert "#1 scatter(" in str(caught.value)
            inner.close()

    ranks.threads(2, work, lending=False)


def test_rank_that_closes_early_is_named() -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(un.PeerLost, match="rank 1 .* has closed the group"):
            group.all_reduce(np.ones(4))

    ranks.threads(3, work)


def test_a_rank_that_leaves_by_an_exception_tells_of_it() -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            with pytest.raises(ValueError, match="bad"), group:
                raise ValueError("bad loss é" + "é" * 200 + "\nat step 7")
            return
        told = r"rank 1 .* has closed the group because of ValueError: bad loss é+\.\.\.; .* Look at rank 1's"
        with pytest.raises(un.PeerLost, match=told):
            group.all_reduce(np.ones(4))

    ranks.threads(3, work)


def test_who_closes_in_a_handler_or_leaves_by_sys_exit() -> None:
    def work(group: un.Group) -> None:
        for number, told in enumerate(("group because of KeyError: 'lr'; it", "group; it was last")):
            inner = group.subgroup(range(3))
            assert inner is not None
            if group.rank == 1 and number == 0:
                try:
                    {}["lr"]
                except KeyError:
                    inner.close()
            elif group.rank == 1:
                with pytest.raises(SystemExit), inner:
                    sys.exit(0)
            else:
                with pytest.raises(un.PeerLost, match=f"has closed the {told}"):
                    inner.barrier()
                inner.close()

    ranks.threads(3, work)


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


def test_closing_with_work_under_way_ends_it() -> None:
    def work(group: un.Group) -> None:
        x = np.ones(4)
        if group.rank == 0:
            reducing = group.all_reduce(x, async_op=True)
            group.close()
            with pytest.raises(un.UnisonoError):
                reducing.wait()
        else:
            with pytest.raises(un.GroupError):
                group.barrier()
                group.barrier()

    ranks.threads(2, work)


def test_a_repeated_call_whose_group_is_closed_meanwhile_says_so() -> None:
    def work(group: un.Group) -> None:
        x = np.ones(4)
        for _ in range(2):
            group.all_reduce(x)
        if group.rank == 0:
            closing = threading.Timer(0.2, group.close)
            closing.start()
            with pytest.raises(un.Aborted, match="closed the group meanwhile"):
                group.all_reduce(x)
            closing.join()
        else:
            time.sleep(0.6)
            with pytest.raises(un.GroupError):
                group.all_reduce(x)

    ranks.threads(2, work)


INTERRUPTED = """
import os, signal, threading, time
import numpy as np
import unisono as un
group = un.init_process_group(init_method=os.environ["MEETING"], timeout=30)
group.barrier()
if group.rank == 0:
    sent = []
    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Timer(0.3, interrupt).start()
    try:
        CALL
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0]
        print("interrupted in time" if took < 2 else f"took {took:.2f} s")
else:
    try:
        group.recv(np.ones(1), 0)  # whatever rank 0 waits for does not come, however late its Ctrl-C is
    except un.Aborted as error:
        print(error)
group.close()
"""


@pytest.mark.parametrize(
    "call",
    ["group.all_reduce(np.ones(1))", "group.recv(np.ones(1), 1)", "group.barrier(async_op=True).wait()"],
)
def test_ctrl_c_in_a_wait_is_heard(call: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(INTERRUPTED.replace("CALL", call))
        mine, other = ranks.processes(2, program)
    assert mine.strip() == "interrupted in time"
    assert "rank 0 was interrupted (Ctrl-C)" in other


def test_exit_without_close_leaves_nothing_and_others_are_told() -> None:
    program = """
import os, numpy as np, unisono as un
group = un.init_process_group(init_method=os.environ["MEETING"], timeout=30)
group.all_reduce(np.ones(1))
if group.rank == 0:
    try:
        group.barrier()
    except un.PeerLost as error:
        print(error)
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        told, _ = ranks.processes(2, path)
    assert "has closed the group; it was last seen after all_reduce #1" in told


def test_an_uncaught_exception_is_told_to_the_others() -> None:
    program = """
import atexit, os
atexit.register(os._exit, 0)  # after all others: what is tested is not the exit code
import numpy as np, unisono as un
def main():
    group = un.init_process_group(init_method=os.environ["MEETING"], timeout=30)
    if group.rank == 1:
        raise FloatingPointError("loss is nan")
    try:
        group.barrier()
    except un.PeerLost as error:
        print(error, flush=True)
main()
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        told, _ = ranks.processes(2, path)
    assert "rank 1" in told and "has closed the group because of FloatingPointError: loss is nan;" in told
