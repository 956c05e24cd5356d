"""Making a group out of another one, some rank of which does not come: the others are told soon, and why."""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, crossed, times
from loops import SPREADS, each, everywhere
from unisono.engine.group import connect

PROGRAM = Path(__file__).resolve().parent / "programs" / "dies_before_a_subgroup.py"


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(("after_s", "spread"), crossed([0.0, 0.5], [*SPREADS]), indirect=["spread"])
def test_a_member_that_dies_is_named(after_s: float) -> None:
    first, _, last = ranks.processes(3, PROGRAM, str(after_s))
    for told in (first, last):
        assert "PeerLost subgroup failed: rank 1 (" in told


Over = threading.Event


def of_the_job(
    act: Callable[[un.Group], Any], end: Callable[[un.Group, Over], Any], error: type[Exception]
) -> str:
    """The error of rank 2 of 5, which is rank 0 in a group of a group; its rank 1 is rank 4 of the job."""
    texts: list[str] = []
    over = Over()

    def work(group: un.Group) -> None:
        part = group.subgroup([1, 2, 4])
        pair = None if part is None else part.subgroup([1, 2])
        if group.rank == 4 and pair is not None:
            end(pair, over)
        elif pair is not None:
            with pytest.raises(error) as told:
                act(pair)
            texts.append(str(told.value))
            over.set()

    ranks.threads(5, work)
    return texts[0]


def is_late(_: un.Group, over: Over) -> None:
    assert over.wait(HANG_S)


def differs(pair: un.Group, _: Over) -> None:
    with pytest.raises(un.Mismatch):
        pair.all_reduce(np.ones(4))


PROCESS = r"rank 4 of the job, (host \S+, )?pid \d+"
OF_JOB = r"\[group=\S+/1/1 seq=\d rank=0/2 ranks of the job: 2, 4\]"
FAULTS = {
    "a rank is late": (
        lambda pair: pair.all_reduce(np.ones(3), timeout=0.3), is_late, un.Timeout,
        rf"rank 1 \(rank 4 of the job\) never arrived \({PROCESS}.* look at the output of rank 4 of the job",
    ),
    "nothing is sent": (
        lambda pair: pair.recv(np.ones(3), 1, timeout=0.3), is_late, un.Timeout,
        rf"recv timed out after 0.3 s: rank 1 did not answer \({PROCESS}",
    ),
    "a rank leaves": (
        lambda pair: pair.all_reduce(np.ones(3)), lambda pair, _: pair.close(), un.PeerLost,
        rf"rank 1 \({PROCESS}\) has closed .* Rank 1 \(rank 4 of the job\) must make",
    ),
    "a rank aborts": (
        lambda pair: pair.all_reduce(np.ones(3)), lambda pair, _: pair.abort(), un.Aborted,
        r"rank 1 \(rank 4 of the job\) aborted the group",
    ),
    "ranks differ": (
        lambda pair: pair.all_reduce(np.ones(3)), differs, un.Mismatch,
        r"(?s)\n  rank 0 \(rank 2 of the job\)  #1 all_red.*\n  rank 1 \(rank 4 of the job\)  #1 all_reduce",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@everywhere
def test_a_fault_of_a_subgroup_names_the_ranks_of_the_job(name: str) -> None:
    act, end, error, match = FAULTS[name]
    text = of_the_job(act, end, error)
    assert re.search(match, text), text
    assert re.search(OF_JOB, text), text


def test_a_group_that_cannot_be_made_is_named() -> None:
    with pytest.raises(un.RendezvousError) as told:
        connect(un.HashStore(), 0, 2, name="pair", timeout_s=0.3, members=(2, 4))
    assert "group 'pair', whose ranks 0, 1 are ranks 2, 4 of the job: rank 1 did not join" in str(told.value)


def made(end: Any, after_s: float, what: type[Exception], match: str) -> None:
    """Rank 1 does `end` in place of coming; the others, in other threads, raise."""
    told: list[str] = []

    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            time.sleep(after_s)
            end(group)
            return
        with pytest.raises(what, match=match) as raised:
            group.subgroup(range(group.size))
        told.append(str(raised.value))

    ranks.threads(3, work)
    assert len(told) == 2


@pytest.mark.parametrize("after_s", [0.0, 0.3], ids=["before", "meanwhile"])
@everywhere
def test_a_member_that_closes_is_named(after_s: float) -> None:
    made(
        lambda group: group.close(),
        after_s,
        un.PeerLost,
        r"subgroup failed: rank 1 \(.* has closed the group",
    )


@everywhere
def test_a_member_that_leaves_by_an_exception_tells_of_it() -> None:
    def leave(group: un.Group) -> None:
        with pytest.raises(ValueError, match="bad loss"), group:
            raise ValueError("bad loss")

    made(leave, 0.3, un.PeerLost, "rank 1 .* has closed the group because of ValueError: bad loss")


@pytest.mark.parametrize("after_s", [0.0, 0.3], ids=["before", "meanwhile"])
@everywhere
def test_a_member_that_aborts_the_group_is_named(after_s: float) -> None:
    made(lambda group: group.abort(), after_s, un.Aborted, "rank 1 aborted the group")


@everywhere
def test_who_is_no_member_may_leave_after_the_call() -> None:
    gone = threading.Event()

    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            assert group.subgroup([0, 2]) is None
            group.close()
            gone.set()
            return
        assert gone.wait(HANG_S)
        pair = group.subgroup([0, 2])
        assert pair is not None
        with pair:
            pair.all_reduce(x := np.ones(1))
        assert x[0] == 2

    ranks.threads(3, work)


@everywhere
def test_who_is_no_member_makes_the_call_all_the_same() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(un.PeerLost, match="subgroup failed: rank 1 .*must make the same calls"):
            group.subgroup([0, 2])

    ranks.threads(3, work)


@everywhere
def test_who_closes_the_parent_as_soon_as_its_child_is_made_does_not_disturb_the_others() -> None:
    def work(world: un.Group) -> None:
        for _ in range(times(usual=8, long=20)):
            parent = world.subgroup(range(world.size))
            assert parent is not None
            child = parent.subgroup(range(world.size))
            parent.close()
            assert child is not None
            with child:
                child.barrier()

    ranks.threads(3, work)


@everywhere
def test_the_store_forgets_the_groups_that_were_made_in_it() -> None:
    store = un.HashStore(HANG_S)
    kept: dict[int, set[int]] = {}
    count = times(usual=20, long=500)

    def work(rank: int) -> None:
        with un.init_process_group(store=store, rank=rank, world_size=2, timeout=HANG_S) as world:
            counted = kept[rank] = set()
            for _ in range(count):
                group = world.subgroup([1, 0])
                assert group is not None
                world.barrier()  # now all have returned from subgroup
                counted.add(store.num_keys())
                world.barrier()
                group.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert all(len(counted) == 1 for counted in kept.values()), kept


@everywhere
def test_a_closed_group_has_no_subgroups() -> None:
    def work(group: un.Group) -> None:
        group.close()
        with pytest.raises(un.GroupClosed, match="was closed"):
            group.subgroup([group.rank])

    ranks.threads(2, work)


@each("chosen", [[1.5], ["0"], [None], 1, [[0]]])
@everywhere
def test_ranks_are_whole_numbers(chosen: Any) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(TypeError, match="expected (the number of a rank|a list)|ranks is a"):
            group.subgroup(chosen)
        pair = group.subgroup(np.array([1, 0]))  # type: ignore[arg-type]
        assert pair is not None
        with pair:
            assert pair.members == (1, 0)

    ranks.threads(2, work)
