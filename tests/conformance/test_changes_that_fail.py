"""Groups that change, where the ranks' calls do not fit, are interrupted, or a newcomer goes away."""

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

import unisono as un
from changing_groups import check, on, with_newcomer
from effort import HANG_S, judge_time
from unisono.engine.bootstrap import peer_info
from unisono.engine.group import admission, joining, shrink, succession


@pytest.mark.parametrize("per_host", [2, 1])
def test_ranks_that_exclude_each_other_are_told(per_host: int) -> None:
    """One that comes late may find that it was evicted meanwhile."""

    def work(group: un.Group) -> None:
        group.barrier()
        with pytest.raises((ValueError, un.Evicted)) as caught:
            group.shrink(exclude=[1 - group.rank]).close()
            raise un.Evicted("the other one was late")  # and so excluded by will
        told.append(str(caught.value))

    told: list[str] = []
    on(2, per_host, work)
    assert len(told) == 2
    assert any("rank 0 excludes [1], rank 1 [0]" in text or "excluded" in text for text in told), told


@pytest.mark.parametrize("per_host", [3, 1])
def test_a_rank_that_calls_something_else_is_told(per_host: int) -> None:
    def work(group: un.Group) -> None:
        if group.rank == 1:
            with pytest.raises(un.GroupError, match="its call of shrink"):
                group.all_reduce(np.ones(4))
        following = group.shrink()
        assert following.size == 3
        check(following)
        following.close()

    on(3, per_host, work)


@pytest.mark.parametrize("per_host", [6, 3])
def test_a_rank_that_does_not_come_is_the_only_one_that_is_late(per_host: int) -> None:
    """The ranks call shrink one after another, so their deadlines differ."""

    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 5:
            over.wait(HANG_S)
            with pytest.raises(un.Evicted, match="late"):
                group.shrink()
            return
        time.sleep(0.15 * (group.rank % 3))
        following = group.shrink(timeout=1)
        assert [(one.rank, one.why) for one in following.left] == [(5, "late")]
        check(following)
        over.set()
        following.close()

    over = threading.Event()
    on(6, per_host, work)


def test_a_rank_that_is_lost_before_the_next_group_begins_behind_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The former group is closed: shrink returns a group all the same."""

    def lost(group: Any, deadline: float) -> Any:
        if group.rank == 2 and group.generation == 1:
            group.close()
            raise un.Aborted("lost")
        time.sleep(max(0.0, deadline + 0.1 - time.monotonic()) if group.generation == 1 else 0.0)
        return begun(group, deadline)

    begun = succession.await_first_barrier
    monkeypatch.setattr(succession, "await_first_barrier", lost)

    def work(group: un.Group) -> None:
        if group.rank == 2:
            with pytest.raises(un.Aborted):
                group.shrink(timeout=1)
            return
        following = group.shrink(timeout=1)
        assert (following.size, following.generation) == (2, 2)
        check(following)
        following.close()

    on(3, 3, work)


def test_a_rank_that_gave_up_cannot_go_on_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "OVERTIME_S", -0.5)

    def work(group: un.Group) -> None:
        if group.rank == 1:
            gave_up.wait(HANG_S)
            following = group.shrink()
            assert following.size == 1
            assert [one.rank for one in following.left] == [0]
            following.close()
            return
        with pytest.raises(un.Timeout, match="no agreement with rank 1"):
            group.shrink(timeout=1)
        gave_up.set()
        for _ in range(2):
            with pytest.raises(un.Evicted, match="gave up"):
                group.shrink()

    gave_up = threading.Event()
    on(2, 2, work)


def test_a_call_of_shrink_that_is_interrupted_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(agreeing: Any, **options: Any) -> Any:
        if agreeing._rank == 0:
            raise KeyboardInterrupt
        return advance(agreeing, **options)

    advance = shrink._Agreeing._advance
    monkeypatch.setattr(shrink._Agreeing, "_advance", interrupted)

    def work(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                group.shrink()
            with pytest.raises(un.Evicted, match="interrupted"):
                group.shrink()
            return
        following = group.shrink()
        assert [one.why for one in following.left] == ["its call of shrink was interrupted"]
        check(following)
        following.close()

    on(3, 3, work)


def test_a_newcomer_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> Any:
        return msgspec.structs.replace(peer_info.local_peer_info(*arguments), layout=1)

    monkeypatch.setattr(joining, "local_peer_info", other)

    def work(group: un.Group, came: Any) -> None:
        while not group.all_reduce(float(came.done()), un.MAX):
            assert group.admit() is group
        check(group)
        group.close()

    def come(addresses: list[str]) -> None:
        with pytest.raises(un.RendezvousError, match="another build of Unisono"):
            un.join(addresses, timeout=HANG_S)

    with_newcomer(2, 2, work, come)


@pytest.mark.parametrize("token", ["cd" * 32, ""])
def test_a_newcomer_with_another_token_is_refused_and_the_group_goes_on(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TOKEN", "ab" * 32)
    with un.init_process_group(rank=0, world_size=1) as group:
        (address,) = group.listen("127.0.0.1")
        monkeypatch.setenv("UNISONO_TOKEN", token)
        began = time.monotonic()
        with pytest.raises(un.AuthenticationError, match="token"):
            un.join(address, timeout=HANG_S)
        judge_time(time.monotonic() - began, 10)  # it does not try again until its timeout
        assert group.waiting() == 0
        assert group.admit() is group


@pytest.mark.parametrize("per_host", [2, 1])
def test_a_newcomer_that_goes_away_delays_nobody(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends right after its invitation; the members keep their group, at once."""
    monkeypatch.setattr(joining, "_member", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))

    def come(addresses: list[str]) -> None:
        with pytest.raises(KeyboardInterrupt):
            un.join(addresses, timeout=HANG_S)

    def work(group: un.Group, came: Any) -> None:
        while not group.waiting():
            pass
        began = time.monotonic()
        with pytest.raises(un.RendezvousError, match="has gone"):
            group.admit()
        judge_time(time.monotonic() - began, 4)
        check(group)
        assert group.admit() is group
        group.close()

    with_newcomer(2, per_host, work, come)


@pytest.mark.parametrize("per_host", [3, 1])
def test_a_rank_that_shrinks_while_the_others_admit(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saw a fault behind the call in which all looked for newcomers; the others go on to admit one."""
    found = admission.look_for_newcomers

    def one_sees_a_fault(group: Any, maximum: int | None) -> Any:
        newcomers = found(group, maximum)
        if newcomers.taken and group.rank == 0 and not seen:
            seen.append(True)
            group._planner.engine.abort()
            raise un.Aborted("a fault")
        return newcomers

    seen: list[bool] = []
    monkeypatch.setattr(admission, "look_for_newcomers", one_sees_a_fault)

    def come(addresses: list[str]) -> int:
        group = un.join(addresses, timeout=HANG_S)
        check(group)
        group.close()
        return group.size

    def work(group: un.Group, came: Any) -> None:
        while group.size < 4:
            try:
                group = group.admit(maximum=4)
            except un.GroupError:
                group = group.shrink(timeout=HANG_S)
                assert group.size == 3
        check(group)
        group.close()

    assert with_newcomer(3, per_host, work, come) == 4


def test_another_thread_cannot_change_the_group_meanwhile() -> None:
    def work(group: un.Group) -> None:
        with group._change("admit"), pytest.raises(RuntimeError, match="shrink: another thread"):
            group.shrink()
        check(group)

    on(1, 1, work)


def test_the_smallest_maximum_of_all_ranks_counts() -> None:
    def come(addresses: list[str]) -> None:
        with pytest.raises(un.RendezvousError):
            un.join(addresses, timeout=1)

    def work(group: un.Group, came: Any) -> None:
        while not group.all_reduce(float(came.done()), un.MAX):
            assert group.waiting(maximum=2 + group.rank) == 0
            with pytest.raises(ValueError, match="maximum is"):  # before a byte moves
                group.waiting(maximum=10**30)
        group.close()

    with_newcomer(2, 2, work, come)


def test_a_newcomer_that_waits_at_a_rank_that_is_lost_is_taken_in_all_the_same() -> None:
    """It knows one address. The rank that listens next on that host takes the same port."""

    def come(addresses: list[str]) -> int:
        group = un.join(f"127.0.0.1:1,{addresses[0]}", timeout=HANG_S)
        check(group)
        group.close()
        return group.size

    def work(group: Any, came: Any) -> None:
        if group.rank == 0:
            while not group.newcomers_here():
                time.sleep(0.01)
            group.close()
            return
        with pytest.raises(un.PeerLost):
            group.barrier()
        group = group.shrink()
        while group.size == 1 and not came.done():
            group = group.admit()
        check(group)
        group.close()

    assert with_newcomer(2, 2, work, come, "127.0.0.1") == 2
