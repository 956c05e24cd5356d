"""Queues between processes: every message in order and whole; readers that are slow, die, stop, join."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from effort import cases, times
from python_runs import ran

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
LOSSES = (
    "dead_reader",
    "dead_holder",
    "dead_relay",
    "dead_writer",
    "struck_writer",
    "stopped",
    "standing",
    "survives",
)
ONE_HOST = pytest.mark.parametrize("per_host", ["0"])
HOSTS = pytest.mark.parametrize("per_host", cases(["0", "2"], long=["1"]))  # "2": both kinds of readers


TOGETHER = {
    2: ("left", "wrong", "forked", "inherited"),
    3: ("holding", "sizes", "kept", "crowded", "joins", "threads", "two", "closed"),
    4: ("every", "latest"),
}
"""Number of ranks -> what one job of them does, one after the other."""


def outputs(mode: str, size: int, per_host: str = "0", code: int | None = 0, **environment: str) -> list[str]:
    """What the ranks print, without the launcher's prefixes. code: None: any."""
    if mode in TOGETHER.get(size, ()):
        return together(size, per_host)[mode]
    return job((mode,), size, per_host, code, **environment)[mode]


@functools.cache
def together(size: int, per_host: str) -> dict[str, list[str]]:
    return job(TOGETHER[size], size, per_host, 0)


def job(modes: tuple[str, ...], size: int, per_host: str, code: int | None, **environment: str) -> Any:
    """By mode, what the ranks print in it."""
    program = PROGRAMS / ("queue_losses.py" if {*modes} <= {*LOSSES} else "queue_ranks.py")
    launch = ("-m", "unisono", "run", "--grace", "60", "-n", size)
    ended = ran(*launch, program, *modes, UNISONO_RANKS_PER_HOST=per_host, **environment)
    assert code is None or ended.returncode == code, ended.stdout + ended.stderr
    found: dict[str, list[str]] = {mode: [] for mode in modes}
    within: dict[str, str] = {}
    for line in ended.stdout.splitlines():
        rank, _, text = line.partition("] ")
        if text.startswith("mode "):
            within[rank] = text.removeprefix("mode ")
        elif rank.startswith("[rank"):
            found[within.get(rank, modes[0])].append(text)
    return found


@HOSTS
def test_each_reader_gets_every_message_in_order(per_host: str) -> None:
    assert Counter(outputs("every", 4, per_host)) == {"put": 1, "400": 3}


def test_ranks_that_may_not_open_each_others_memory_get_the_same() -> None:
    assert Counter(outputs("apart", 3)) == {"put": 1, "400": 2}


@HOSTS
def test_latest_gives_newer_whole_messages_and_the_last_one(per_host: str) -> None:
    assert Counter(outputs("latest", 4, per_host)) == {"put": 1, "2000": 3}


@HOSTS
def test_latest_waits_for_nobody(per_host: str) -> None:
    assert outputs("holding", 3, per_host) == ["True"] * 2


@HOSTS
def test_a_message_is_at_most_as_large_as_its_queue(per_host: str) -> None:
    found = outputs("sizes", 3, per_host)
    refused = (
        "put: the message has 524352 bytes, the queue 65536 in all. Open it with more bytes=, or put smaller"
    )
    assert found.count("next") == 2
    assert any(line.startswith(refused) for line in found), found


@HOSTS
def test_a_reader_keeps_messages_while_many_more_pass(per_host: str) -> None:
    assert outputs("kept", 3, per_host) == ["True True"] * 2


def test_latest_replaces_a_message_that_no_reader_has() -> None:
    late, read = "Timeout: queue.put timed out", "[200, 65336, 65336, 3]"
    assert Counter(outputs("crowded", 3)) == {late: 1, read: 2}


@HOSTS
def test_readers_join_and_leave(per_host: str) -> None:
    assert outputs("joins", 3, per_host) == ["last"] * 2


@pytest.mark.parametrize("per_host", ["0", "1"])
def test_leaving_ends_a_call_of_another_thread_and_keeps_arrays(per_host: str) -> None:
    ended = "GroupClosed: queue.get failed: this rank has left the queue"
    again = "ValueError: get: rank 1 has left this queue; call join() before"
    assert outputs("left", 2, per_host) == [f"['{ended}'] True {again}"]


@pytest.mark.parametrize(
    ("mode", "per_host"), [("dead_reader", "0"), ("dead_reader", "1"), ("dead_holder", "0")]
)
def test_a_dead_reader_is_named_once_and_the_others_go_on(mode: str, per_host: str) -> None:
    found = Counter(outputs(mode, 4, per_host, None))
    assert found["all"] == 2
    named = {"dead_reader": ["[(1, True, True)]"], "dead_holder": ["lost rank 1"]}[mode]
    assert sum(found[each] for each in named) == 1, found


def test_a_dead_relay_is_named_on_both_sides() -> None:
    found = Counter(outputs("dead_relay", 4, "2", None))
    assert found == {"['2 False']": 1, "[]": 1, "['2 True']": 1}


@pytest.mark.parametrize("per_host", cases(["2"], long=["0", "1"]))
def test_a_dead_writer_is_named_after_its_messages(per_host: str) -> None:
    found = Counter(outputs("dead_writer", 4, per_host, None))
    assert sum(found.values()) == 3
    assert all("PeerLost: queue.get failed: rank 0" in line for line in found), found


@ONE_HOST
def test_what_a_writer_has_put_before_it_dies_comes_whole(per_host: str) -> None:
    for _ in range(times(usual=1, long=10)):
        assert Counter(outputs("struck_writer", 3, per_host, None)) == {"lost 0, all": 2}


@ONE_HOST
def test_a_queue_survives_the_loss_of_a_rank(per_host: str) -> None:
    assert outputs("survives", 4, per_host, None) == ["goes on"] * 3


@ONE_HOST
def test_a_stopped_reader_is_named(per_host: str) -> None:
    found = outputs("stopped", 3, per_host)
    assert found.count("all") == 2
    named = [line for line in found if line != "all"]
    assert len(named) == 1
    assert named[0].startswith(
        "queue.put timed out after 0.7 s: rank 1 (pid PID) has not taken message 1 for "
    )
    assert named[0].endswith("it is stopped (SIGSTOP, a debugger)")


@HOSTS
def test_a_reader_that_stands_still_is_named_with_its_line(per_host: str) -> None:
    line = next(
        i
        for i, text in enumerate((PROGRAMS / "queue_losses.py").read_text().splitlines(), 1)
        if "# HERE" in text
    )
    found = outputs("standing", 3, per_host)
    assert len(found) == 1
    assert found[0].startswith("Timeout: queue.put timed out after 1 s: rank 1 (pid ")
    assert " holds message 1 for " in found[0]
    assert (
        f"queue_losses.py:{line} in standing" in found[0] or f"queue_losses.py:{line - 1} in" in found[0]
    ), found


@HOSTS
def test_threads_share_a_queue(per_host: str) -> None:
    assert Counter(outputs("threads", 3, per_host)) == {"put": 1, "True": 2}


@HOSTS
def test_two_queues(per_host: str) -> None:
    found = outputs("two", 3, per_host)
    assert sorted(found) == [
        "ValueError: get: rank 0 writes this queue; rank 0 writes it, [1] read it",
        "ValueError: get: rank 2 neither writes nor reads this queue; rank 0 writes it, [1] read it",
        "read",
    ]


@HOSTS
def test_messages_of_a_queue_that_is_closed_are_still_read(per_host: str) -> None:
    found = Counter(outputs("closed", 3, per_host))
    over = "GroupClosed: queue.get failed: rank 0, the writer, has closed the queue"
    refused = "GroupClosed: queue.put failed: this rank has closed the queue or its group"
    assert found == {refused: 1, f"True {over}": 2}


def test_wrong_arguments() -> None:
    found = outputs("wrong", 2)
    assert len(found) == 20
    assert all(line.startswith(("ValueError", "TypeError", "Timeout")) for line in found), found
    assert any("Timeout: queue.get timed out after 0 s: rank 0 (pid" in line for line in found)


def test_a_forked_child_frees_nothing() -> None:
    assert outputs("forked", 2) == ["True"]


@pytest.mark.parametrize("per_host", ["0", "1"])
def test_a_forked_child_leaves_and_closes_nothing(per_host: str) -> None:
    assert outputs("inherited", 2, per_host) == ["still here"]
