"""Calls that share a plan, or say nothing of their buffers, are told apart all the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from loops import each, everywhere

Calls = Callable[[un.Group], Any]


def one() -> np.ndarray:
    return np.ones(1, np.int64)


def rows(group: un.Group) -> np.ndarray:
    return np.zeros((group.size, 1), np.int64)


def f32(numel: int) -> np.ndarray:
    return np.ones(numel, np.float32)


def i32(numel: int) -> np.ndarray:
    return np.ones(numel, np.int32)


KINDS: dict[str, tuple[Calls, Calls]] = {
    "gather, gather_object": (
        lambda g: g.gather(one(), rows(g) if g.rank == 0 else None),
        lambda g: g.gather_object("x"),
    ),
    "scatter, scatter_object": (
        lambda g: g.scatter(one(), rows(g) if g.rank == 0 else None),
        lambda g: g.scatter_object(["x"] * g.size if g.rank == 0 else None),
    ),
    "broadcast, broadcast_object": (lambda g: g.broadcast(one(), 0), lambda g: g.broadcast_object("x", 0)),
    "all_gather, all_gather_object": (
        lambda g: g.all_gather(rows(g), one()),
        lambda g: g.all_gather_object("x"),
    ),
    "all_gather, all_gather_v": (
        lambda g: g.all_gather(rows(g), one()),
        lambda g: g.all_gather_v(list(rows(g)), one()),
    ),
    "split, all_gather_object": (lambda g: g.split(0), lambda g: g.all_gather_object((0, 0))),
    "gather_object, reduce_object": (lambda g: g.gather_object(1), lambda g: g.reduce_object(1)),
    "gather_object, broadcast_object": (lambda g: g.gather_object(1), lambda g: g.broadcast_object(1)),
    "gather_object, all_gather_object": (lambda g: g.gather_object(1), lambda g: g.all_gather_object(1)),
    "all_to_all_object, scatter_object": (
        lambda g: g.all_to_all_object(["x"] * g.size),
        lambda g: g.scatter_object(["x"] * g.size if g.rank == 0 else None),
    ),
    "all_to_all, all_to_all_object": (
        lambda g: g.all_to_all(rows(g), rows(g)),
        lambda g: g.all_to_all_object(["x"] * g.size),
    ),
    "scan_object, all_reduce_object": (lambda g: g.scan_object(1), lambda g: g.all_reduce_object(1)),
    "reduce_object, all_reduce_object": (
        lambda g: (g.reduce_object(1), g.barrier()),
        lambda g: (g.all_reduce_object(1), g.barrier()),
    ),
    "subgroup, barrier": (lambda g: g.subgroup(range(g.size)), lambda g: g.barrier()),
    "all_reduce, all_reduce_coalesced": (
        lambda g: g.all_reduce(f32(3)),
        lambda g: g.all_reduce_coalesced([f32(3)]),
    ),
}


@each("names", KINDS)
@each("turned", [False, True])
@everywhere
def test_every_public_call_has_its_own_kind(names: str, turned: bool) -> None:
    usual, odd = KINDS[names][:: -1 if turned else 1]

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            (odd if group.rank == 1 else usual)(group)
            group.barrier()  # who only sends is told in the next call
        assert all(f"#1 {name}(" in str(caught.value) for name in names.split(", "))

    ranks.threads(2, work)


ROOTED: dict[str, Callable[[un.Group, int], Any]] = {
    "broadcast_object": lambda g, root: g.broadcast_object("x", root),
    "gather_object": lambda g, root: g.gather_object("x", root),
    "reduce_object": lambda g, root: g.reduce_object("x", dst=root),
    "scatter_object": lambda g, root: g.scatter_object(["x"] * g.size, root),
}


@each("name", ROOTED)
@each("beyond", [0, 2])
@everywhere
def test_object_calls_with_different_roots_are_told(name: str, beyond: int) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            ROOTED[name](group, beyond if group.rank == 1 else 1)
            group.barrier()
        first = str(caught.value).partition("\n")[0]
        assert all(f"{name}(root={root}" in str(caught.value) for root in (1, beyond)), caught.value
        assert "ranks called different things" in first

    ranks.threads(3, work)


LISTS = {
    "order": ([(f32, 3), (i32, 3)], [(i32, 3), (f32, 3)]),
    "order of sizes": ([(f32, 2), (f32, 3)], [(f32, 3), (f32, 2)]),
    "large and small": ([(f32, 40_000), (f32, 2)], [(f32, 2), (f32, 40_000)]),
    "count": ([(f32, 2), (f32, 2)], [(f32, 4)]),
    "an empty one": ([(f32, 2), (f32, 0)], [(f32, 2)]),
}


@each("name", LISTS)
@each("queued", [False, True])
@everywhere
def test_a_coalesced_call_compares_its_list_as_it_was_given(name: str, queued: bool) -> None:
    def work(group: un.Group) -> None:
        xs = [make(numel) for make, numel in LISTS[name][group.rank]]
        with pytest.raises(un.Mismatch) as caught:
            work = group.all_reduce_coalesced(xs, async_op=queued)
            if work is not None:
                work.wait()
        text = str(caught.value)
        assert text.startswith("ranks called different things")
        for called in LISTS[name]:
            shown = ", ".join(f"{make(0).dtype}[{numel}]" for make, numel in called)
            assert f" with {shown}\n" in text, text

    ranks.threads(2, work)


@each(
    "members",
    [
        ([2], [1], [2]),
        ([0], [1], [2]),
        ([0, 1], [1, 0], [0, 1]),
        ([1, 2], [1, 2], [0, 1, 2]),
        ([1], [0], [0]),
    ],
)
@everywhere
def test_subgroups_of_other_ranks_are_told(members: tuple[list[int], ...]) -> None:
    def work(group: un.Group) -> None:
        mine = members[group.rank]
        made = None
        with pytest.raises(un.Mismatch) as caught:
            made = group.subgroup(mine)
            group.barrier()  # who is in no list need not wait before
        assert made is None
        told = str(caught.value)
        # the others found out before it called, or before its call began
        late = ("not there yet; last seen before any operation", "called when the group had already failed")
        called = [f"  rank {rank}  #1 subgroup({listed})" in told for rank, listed in enumerate(members)]
        for rank, was in enumerate(called):
            assert was or any(f"  rank {rank}  #1 {text}" in told for text in late), told
        assert len({tuple(members[rank]) for rank, was in enumerate(called) if was}) > 1, told

    ranks.threads(3, work)


@everywhere
def test_who_is_not_in_a_subgroup_does_not_wait_for_it() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            assert group.subgroup([1, 2]) is None
            group.send(one(), 1)
        else:
            if group.rank == 1:
                group.recv(one(), 0)  # which rank 0 sends after its call
            inner = group.subgroup([1, 2])
            assert inner is not None
            inner.close()
        group.barrier()

    ranks.threads(3, work)


@each(
    ("sent", "received", "said"),
    [
        (lambda g: g.send(one(), 1), lambda g: g.recv_object(0), "got int64[1], expected an object"),
        (lambda g: g.send(-one(), 1), lambda g: g.recv_object(), "got int64[1], expected an object"),
        (lambda g: g.isend(one(), 1).wait(), lambda g: g.recv_object(0), "got int64[1], expected an object"),
        (lambda g: g.send_object("x", 1), lambda g: g.recv(one(), 0), "got an object, expected int64[1]"),
        (
            lambda g: g.send_object("x", 1),
            lambda g: g.irecv(one()).wait(),
            "got an object, expected int64[1]",
        ),
    ],
)
@each("arrived", [False, True])
@everywhere
def test_an_object_is_no_array(sent: Calls, received: Calls, said: str, arrived: bool) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            if group.rank == 0:
                sent(group)
            if arrived:
                group.barrier()
            if group.rank == 1:
                received(group)
            group.barrier()
        assert said in str(caught.value)
        assert "was of another kind" in str(caught.value)

    ranks.threads(2, work)


@everywhere
def test_objects_pass_by_any_tag_and_source() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            assert group.recv_object(tag=un.ANY_TAG) == {"x": [1] * 500}
            assert group.recv_object(1, 7) == "y"
        else:
            group.send_object({"x": [1] * 500}, 0, 3)
            group.send_object("y", 0, 7)
        group.send_object("self", group.rank)
        assert group.recv_object(group.rank) == "self"

    ranks.threads(2, work)


HUGE = (2**31, 2**32, -(2**32), -(2**63), 2**63, 2**64, -(2**70))


@each("number", HUGE)
@everywhere
def test_numbers_are_narrowed_after_they_were_checked(number: int) -> None:
    def work(group: un.Group) -> None:
        x = one()
        group.broadcast(x, 0)  # from here on the call is remembered
        group.reduce(x, 0)
        refused: list[Callable[[], Any]] = [
            lambda: group.broadcast(x, number),
            lambda: group.reduce(x, dst=number),
            lambda: group.broadcast(x, src=number, async_op=True),
            lambda: group.broadcast_object(1, number),
            lambda: group.recv(x, 0, tag=number),
            lambda: group.recv(x, number),
            lambda: group.send(x, number),
            lambda: group.send(x, 0, number),
            lambda: group.isend(x, 0, number),
            lambda: group.irecv(x, number),
            lambda: group.send_object(x, number),
            lambda: group.recv_object(0, number),
            lambda: group.subgroup([number]),
        ]
        for call in refused:
            with pytest.raises(ValueError, match="is not in group|expected 0..2147483647"):
                call()
        group.barrier()

    ranks.threads(2, work)


@everywhere
def test_tags_and_ranks_are_whole_numbers() -> None:
    def work(group: un.Group) -> None:
        x = one()
        for call in (
            lambda: group.send(x, 0, 1.0),
            lambda: group.recv(x, 0.0),
            lambda: group.subgroup([0.5]),
        ):
            with pytest.raises(TypeError, match="expected (a whole number|the number of a rank)"):
                call()

    ranks.threads(1, work)
