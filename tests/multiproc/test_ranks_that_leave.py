"""Ranks that leave before the others: these are told, and why, where there is a reason."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un
from loops import everywhere, of_two

PROGRAMS = Path(__file__).resolve().parent / "programs"


@everywhere
def test_rank_that_closes_early_is_named() -> None:
    def work(group: un.Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(un.PeerLost, match="rank 1 .* has closed the group"):
            group.all_reduce(np.ones(4))

    ranks.threads(3, work)


@everywhere
def test_ranks_that_leave_in_order_do_not_end_what_may_still_come() -> None:
    def work(group: un.Group) -> None:
        x, late = np.zeros(1), np.zeros(1)
        if group.rank > 0:
            group.send(np.ones(1), 0, group.rank)
            if group.rank == 1:  # the other one stays a while
                group.recv(x, 0)
            group.close()
            return
        posted = group.irecv(late, None, 9)
        assert [group.recv(x, None, un.ANY_TAG) for _ in range(2)] in ([1, 2], [2, 1])
        group.send(x, 1)
        time.sleep(0.3)  # until both have left, and its thread has seen it
        assert group.iprobe() is None
        assert not posted.done()
        group.send(np.full(1, 7.0), 0, 9)
        posted.wait()
        assert late[0] == 7
        with pytest.raises(un.PeerLost):
            group.recv(x)

    ranks.threads(3, work)


@everywhere
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


@pytest.mark.parametrize("close", [False, True], ids=["with", "close"])
@everywhere
def test_who_leaves_of_itself_names_no_error_of_long_ago(
    close: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of a handler around the whole block nor one that a tool has put aside."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)

    def leave(group: un.Group) -> None:
        if close:
            group.close()
            return
        try:
            {}["checkpoint"]
        except KeyError:
            with group:
                pass

    def work(group: un.Group) -> None:
        if group.rank == 1:
            leave(group)
            return
        with pytest.raises(un.PeerLost, match="has closed the group; it was last"):
            group.barrier()

    ranks.threads(2, work)


@everywhere
def test_a_group_is_left_whatever_its_reason_is_like() -> None:
    class Empty(Exception):
        def __len__(self) -> int:
            return 0

    class Neither(Exception):
        def __bool__(self) -> bool:
            raise RuntimeError

    def work(group: un.Group) -> None:
        for kind in (Empty, Neither):
            inner = group.subgroup(range(2))
            assert inner is not None
            if group.rank == 1:
                with pytest.raises(kind), inner:
                    raise kind("loss is nan")
            else:
                with pytest.raises(un.PeerLost, match=f"because of {kind.__name__}: loss is nan;"):
                    inner.barrier()
                inner.close()

    ranks.threads(2, work)


@everywhere
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


@of_two
@pytest.mark.parametrize("joining", ["together", "slowly"])
def test_an_uncaught_exception_is_told_to_the_others(joining: str) -> None:
    """Also to a rank that is still joining when the other has joined, failed and ended."""
    told, _ = ranks.processes(2, PROGRAMS / "leaves_by_an_exception.py", joining)
    assert "rank 1" in told and "has closed the group because of FloatingPointError: loss is nan;" in told
