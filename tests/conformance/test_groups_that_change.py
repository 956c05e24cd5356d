"""Groups that change, with ranks that are threads: shrink, admit and join; what their next groups reduce."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from changing_groups import check, on
from effort import HANG_S
from unisono.engine.group import elastic_loop
from unisono.engine.group.elastic_loop import ElasticLoop


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (3, 3), (4, 2), (3, 1)])
def test_a_healthy_group_is_made_anew(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for generation in range(1, 6):
            group.all_reduce(np.ones(10))
            group = group.shrink()
            assert (group.size, group.generation, group.left) == (size, generation, ())
            assert group.previous_ranks == tuple(range(size))
            check(group)
        group.close()

    on(size, per_host, work)


@pytest.mark.parametrize("per_host", [4, 2])
def test_a_rank_that_has_closed_is_named_with_its_newest_call(per_host: int) -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            with pytest.raises(ValueError, match="bad"), group:
                raise ValueError("bad loss")
            return
        with pytest.raises(un.PeerLost):
            group.all_reduce(np.ones(4))
        following = group.shrink()
        check(following)
        (left,) = following.left
        assert (left.rank, left.why, left.generation) == (1, "left because of ValueError: bad loss", 0)
        assert left.last_seen == "after barrier #1"
        assert following.previous_ranks == (0, 2, 3)
        assert group.closed
        with pytest.raises(un.GroupClosed):
            group.barrier()
        following.close()

    on(4, per_host, work)


def test_a_mismatch_leaves_nobody_out() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch):
            group.all_reduce(np.ones(4 + group.rank))
        following = group.shrink()
        assert following.size == 3
        check(following)
        following.close()

    on(3, 3, work)


@pytest.mark.parametrize("per_host", [4, 2])
def test_excluded_ranks_get_evicted(per_host: int) -> None:
    def work(group: un.Group) -> None:
        if group.rank in (1, 3):
            with pytest.raises(un.Evicted) as caught:
                group.shrink(exclude=[1, 3])
            assert "excluded" in caught.value.why
            return
        following = group.shrink(exclude=[3, 1])
        assert following.size == 2
        assert [one.why for one in following.left] == ["excluded", "excluded"]
        check(following)
        following.close()

    on(4, per_host, work)


@pytest.mark.parametrize("per_host", [3, 1])
def test_different_lists_are_an_error_that_shows_both(per_host: int) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(ValueError, match=r"rank 0 excludes \[2\], rank 1 \[\]"):
            group.shrink(exclude=[2] if group.rank == 0 else [])

    def lonely(group: un.Group) -> None:
        if group.rank == 2:
            done.wait(HANG_S)
            return
        work(group)
        if group.rank == 0:
            done.set()

    done = threading.Event()
    on(3, per_host, lonely)


def test_wrong_lists_are_refused_before_anything_happens() -> None:
    def work(group: un.Group) -> None:
        wrong: list[tuple[Any, type[Exception], str]] = [
            ([2], ValueError, "rank 2 is not in group"),
            ([-1], ValueError, "rank -1"),
            ([1 << 70], ValueError, "is not in group"),
            ([0, 0], ValueError, "twice"),
            ([0, 1], ValueError, "leaves no rank"),
            ("01", TypeError, "a list of ranks"),
            ([None], TypeError, "expected the number of a rank"),
            (3, TypeError, "expected a list"),
            (memoryview(np.zeros((2, 2))), TypeError, "expected a list"),
        ]
        for given, kind, text in wrong:
            with pytest.raises(kind, match=text):
                group.shrink(exclude=given)
        with pytest.raises(ValueError, match="timeout"):
            group.shrink(timeout=-1)
        check(group)

    on(2, 2, work)


@pytest.mark.parametrize("per_host", [2, 1])
def test_newcomers_are_taken_in_where_the_members_say_so(per_host: int) -> None:
    addresses: list[str] = []
    listening = threading.Event()

    def work(group: un.Group) -> None:
        assert group.listen() == group.listen()
        assert group.admit() is group  # nobody waits
        if group.rank == 0:
            addresses.extend(group.listen())
            listening.set()
        else:
            group.listen()
        while group.size < 4:
            group = group.admit(maximum=4)
        check(group)
        assert group.previous_ranks[:2] == (0, 1)
        assert group.previous_ranks[-1] is None
        group = group.shrink(exclude=[0])
        check(group)
        group.close()

    def come(_: int) -> tuple[int, int]:
        listening.wait(HANG_S)
        group = un.join(addresses, timeout=HANG_S)
        rank = group.rank
        while group.size < 4:
            group = group.admit(maximum=4)
        check(group)
        group = group.shrink(exclude=[0])
        check(group)
        group.close()
        return rank, group.generation

    def guarded(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(un.Evicted):
                work(group)
        else:
            work(group)

    with ThreadPoolExecutor(2) as pool:
        came = [pool.submit(come, number) for number in range(2)]
        on(2, per_host, guarded)
        assert sorted(each.result(HANG_S)[0] for each in came) == [2, 3]


def test_a_newcomer_that_nobody_takes_in_gives_up() -> None:
    def work(group: un.Group) -> None:
        (address,) = group.listen()
        if group.rank == 0:
            with pytest.raises(un.RendezvousError, match="no group took this process in"):
                un.join(address, timeout=0.5)
        group.barrier()
        assert group.waiting() == 0
        assert group.admit() is group

    on(2, 2, work)


def test_an_address_has_a_host_and_a_port() -> None:
    for wrong in ("", "host", "host:", ":1", "host:99999", []):
        with pytest.raises(ValueError, match="HOST:PORT"):
            un.join(wrong)


def test_a_group_that_does_not_listen_admits_nobody() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(RuntimeError, match="does not listen"):
            group.admit()
        with pytest.raises(ValueError, match="maximum"):
            group.admit(maximum=0)

    on(1, 1, work)


# ---- the loop of `un.elastic` over the groups of a program, where faults come early, or again and again ----


@pytest.mark.parametrize("per_host", [3, 1])
def test_a_rank_that_is_lost_while_the_first_group_begins_to_listen_is_out(per_host: int) -> None:
    """`un.elastic` listens before the first turn: a loss there is dealt with like any other."""

    def work(group: Any) -> None:
        if group.rank == 2:
            group.close()
            return
        loop = ElasticLoop(group, 1, None)
        loop.listen(("127.0.0.1", 0))
        assert [one.rank for one in loop.group.left] == [2]
        x = np.ones(4)
        loop.group.all_reduce(x)
        assert (x == 2).all()
        assert loop.group.waiting() == 0  # it listens, too
        loop.group.barrier()
        loop.close()

    ranks.threads(3, work, per_host=per_host)


def turns_that_abort(size: int) -> list[int]:
    """How many turns of a loop each rank has made until its fault was raised; at most five."""

    def work(group: Any) -> int:
        loop = ElasticLoop(group, 1, None)
        for turn in range(1, 6):
            with pytest.raises(un.Aborted) as fault, contextlib.ExitStack() as ends:
                ends.callback(loop.group.abort)
                loop.group.barrier()
                raise un.Aborted("the program's own")
            loop.leave(fault.value)
            try:
                assert loop.next_group()
            except un.Aborted:
                return turn
        loop.close()
        return 5

    found: list[int] = ranks.threads(size, work, per_host=size)
    return found


def test_a_fault_after_which_nobody_is_out_is_raised_if_it_comes_again_and_again() -> None:
    assert turns_that_abort(2) == [elastic_loop.MOST_VAIN] * 2


def test_faults_far_from_each_other_are_dealt_with_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_loop, "STEADY_S", float("-inf"))
    assert turns_that_abort(2) == [5, 5]
