"""Ranks that call different things, or the same with sizes that do not fit: all are told who differs."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, judge_time
from launching import wait_until
from loops import each, everywhere

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


@each("name", DIFFERENT)
@pytest.mark.parametrize("size", [2, 3])
@everywhere
def test_ranks_that_call_different_things_are_all_told_within_a_second(name: str, size: int) -> None:
    usual, odd = DIFFERENT[name]
    told: dict[int, str] = {}
    took: list[float] = []

    def work(group: un.Group) -> None:
        group.barrier()
        started = time.monotonic()
        with pytest.raises(un.Mismatch) as caught:
            (odd if group.rank == 1 else usual)(group)
            group.barrier()  # a rank that could finish alone is told in its next call
        took.append(time.monotonic() - started)
        told[group.rank] = str(caught.value)

    ranks.threads(size, work)
    judge_time(max(took), 1)
    for text in told.values():
        assert "ranks called different things" in text
        assert all(f"rank {rank}  #2" in text for rank in range(size))


@everywhere
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


ODD = {
    "operation": (lambda g: g.broadcast(np.ones(4), 0), "rank 1 called broadcast, the others all_reduce ["),
    "size": (lambda g: g.all_reduce(np.ones(5)), "rank 1 called all_reduce with float64[5], the others with"),
    "op": (
        lambda g: g.all_reduce(np.ones(4), un.MAX),
        "rank 1 called all_reduce with MAX, the others with SUM [",
    ),
}


def _others_wait_in_the_first_call(group: un.Group) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    wait_until(lambda: all(" #1" in group.last_seen(rank) for rank in others))


@each("name", ODD)
@everywhere
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


@each("name", UNEVEN)
@each("collective", ["all_to_all", "gather", "scatter"])
@everywhere
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
        assert text.startswith("sizes do not fit: rank 1 sent ") and said in text, text
        assert f"rank 1  #1 {collective}(float64, " in text  # others may not have come yet
        assert "must send as many elements as the receiver expects" in text

    ranks.threads(3, work)


PASSED_ON = {  # collective, root, the rank whose own size is wrong
    "its block comes by rank 3": (
        *("scatter", 1, 0),
        "rank 3 sent 4 elements (the block of rank 0, on its way from rank 1) to rank 0, which expected 5 [",
    ),
    "its own comes before the one it passes on": (
        *("scatter", 1, 3),
        "rank 1 sent 4 elements to rank 3, which expected 5 [",
    ),
    "a leaf below the root": ("scatter", 1, 2, "rank 1 sent 4 elements to rank 2, which expected 5 ["),
    "its block goes by rank 3": (
        *("gather", 1, 0),
        "rank 0 sent 5 elements (the block of rank 0, on its way to rank 1) to rank 3, which expected 4 [",
    ),
    "a leaf beside the root": ("gather", 1, 2, "rank 2 sent 5 elements to rank 1, which expected 4 ["),
}


@each("name", PASSED_ON)
@everywhere
def test_a_mismatch_of_sizes_tells_whose_block_a_rank_passes_on(name: str) -> None:
    """Its program names no size for that rank. Below rank 1 are 2 and 3, below rank 3 is 0."""
    collective, root, wrong, said = PASSED_ON[name]

    def work(group: un.Group) -> None:
        own = np.zeros(5 if group.rank == wrong else 4)
        blocks = [np.zeros(4) for _ in range(4)] if group.rank == root else None
        with pytest.raises(un.Mismatch) as caught:
            getattr(group, collective)(own, blocks, root, algorithm="binomial")
            for _ in range(3):
                group.barrier()
        assert str(caught.value).startswith(f"sizes do not fit: {said}")

    ranks.threads(4, work)


@everywhere
def test_sizes_that_do_not_fit_are_not_the_news_where_one_calls_something_else() -> None:
    called = threading.Event()

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            if group.rank == 2:
                group.broadcast(np.ones(4), 2)
                called.set()
            else:
                called.wait(HANG_S)
                given = [np.zeros(2 if rank == group.rank else 3) for rank in range(3)]
                group.all_to_all([np.zeros(2) for _ in range(3)], given)
            group.barrier()
        assert str(caught.value).startswith("ranks called different things")

    ranks.threads(3, work)


@everywhere
def test_a_mismatch_of_sizes_in_whole_segments() -> None:
    """The first message of a block tells how long it is: nobody returns with part of one."""

    def work(group: un.Group) -> None:
        for given, wanted in ((2 * BIG, BIG), (BIG, 2 * BIG)):
            inner = group.subgroup(range(2))
            assert inner is not None
            with pytest.raises(un.Mismatch) as caught:
                if group.rank == 0:
                    inner.scatter(np.zeros(BIG), [np.zeros(BIG), np.zeros(given)], 0)
                else:
                    inner.scatter(np.zeros(wanted), None, 0)
                    returned.append(wanted)
                inner.barrier()
            text = str(caught.value)
            said = f"rank 0 sent {given} elements to rank 1, which expected {wanted} "
            assert text.startswith(f"sizes do not fit: {said}"), text
            assert "#1 scatter(" in text
            inner.close()

    returned: list[int] = []
    ranks.threads(2, work, zero_copy=False)
    assert not returned


# ---- a Mismatch shows where in the caller's source every rank was: between processes, from real files ----


PROGRAMS = Path(__file__).resolve().parent / "programs"


def _at(program: Path, mark: str) -> str:
    """As a Mismatch names the line with this mark."""
    lines = enumerate(program.read_text().splitlines(), 1)
    number = next(number for number, line in lines if f"# {mark}" in line)
    return f"at {program}:{number}"


def test_all_ranks_show_the_lines_of_all() -> None:
    program = PROGRAMS / "calls_in_different_lines.py"
    outputs = [output.split("--\n") for output in ranks.processes(2, program)]
    at = {mark: _at(program, mark) for mark in "ABCDEFG"}
    for blocking, queued, ahead, message, _ in outputs:
        lines = blocking.splitlines()
        assert lines[1] == f"  rank 0  #1 all_reduce(float64[3], SUM, algorithm=one_shot)  {at['B']}"
        assert lines[2] == f"  rank 1  #1 all_reduce(float64[3], MAX, algorithm=one_shot)  {at['A']}"
        lines = queued.splitlines()
        assert lines[1] == f"  rank 0  #1 all_reduce(float64[3], SUM, algorithm=one_shot)  {at['D']}"
        assert lines[2] == f"  rank 1  #1 all_reduce(float64[2], SUM, algorithm=one_shot)  {at['C']}"
        lines = ahead.splitlines()
        assert lines[1].startswith("  rank 0  #1 broadcast(float64[3], root=0, algorithm=direct)  ")
        assert lines[1].endswith((f"{at['E']}", f"(by now {at['F']})"))
        assert lines[2] == f"  rank 1  #1 barrier(algorithm=direct)  {at['F']}"
        assert f"recv {at['G']}" in message
        assert "got int32[2], expected float64[3]" in message
        assert "from rank 1 with tag 5" in message
    for one, other in zip(*outputs, strict=True):  # but for the first line, which says who tells
        assert one.splitlines()[1:] == other.splitlines()[1:]


@pytest.mark.torch
def test_line_of_a_call_through_torch_is_the_users(forks: Any, tmp_path: Path) -> None:
    program = PROGRAMS / "brings_another_size_to_torch.py"
    for printed in forks.run_program(tmp_path, 2, program, MEETING=f"file://{tmp_path}/meeting"):
        assert printed.count(_at(program, "here")) == 2, printed


def test_a_rank_that_is_elsewhere_does_not_hold_up_the_others() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 2:
            return  # and never calls
        with pytest.raises(un.Mismatch, match="rank 2  #1 not there yet"):
            group.all_reduce(np.ones(3 + group.rank))

    ranks.threads(3, work)
