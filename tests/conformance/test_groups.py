"""Groups of some ranks: their numbers, their independent order, their end."""

import os
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S
from loops import each, everywhere
from unisono import _native
from unisono.engine.group import native


@everywhere
def test_subgroup_has_ranks_of_its_own() -> None:
    def work(world: un.Group) -> None:
        group = world.subgroup([2, 0])
        if world.rank not in (0, 2):
            assert group is None
            return
        assert group is not None
        with group:
            assert (group.rank, group.size, group.members) == ([2, 0].index(world.rank), 2, (2, 0))
            assert group.members[group.rank] == world.rank
            x = np.array([world.rank + 1.0])
            group.all_reduce(x)
            assert x[0] == 4
            group.broadcast(x := np.array([world.rank]), 0)
            assert x[0] == 2, "root 0 of the group is rank 2 of the world"

    ranks.threads(4, work)


@everywhere
def test_split_by_color_and_key() -> None:
    def work(world: un.Group) -> None:
        color = None if world.rank == 4 else world.rank % 2
        group = world.split(color, key=-world.rank)
        if world.rank == 4:
            assert group is None
            return
        assert group is not None
        assert group.members == ((2, 0) if color == 0 else (3, 1))
        assert group.all_gather_object(world.rank) == list(group.members)
        group.close()

    ranks.threads(5, work)


@everywhere
def test_split_that_fails_for_some_leaves_all_with_the_same_count(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = native.connect

    def failing(store: un.Store, rank: int, size: int, **options: Any) -> un.Group:
        if options["members"] == (0, 2):
            raise un.RendezvousError("made to fail")
        return connect(store, rank, size, **options)

    def work(world: un.Group) -> None:
        if world.rank % 2 == 0:
            with pytest.raises(un.RendezvousError, match=r"subgroup\(\[0, 2\]\).*made to fail"):
                world.split(0)
        else:
            half = world.split(1)
            assert half is not None
            half.close()
        everybody = world.subgroup(range(world.size))
        assert everybody is not None
        assert everybody.all_gather_object(everybody.name) == ["test/3"] * 4
        everybody.close()

    with monkeypatch.context() as patched:
        patched.setattr(native, "connect", failing)
        ranks.threads(4, work, timeout_s=HANG_S)


@everywhere
def test_several_groups_at_once_have_independent_orders() -> None:
    def work(world: un.Group) -> None:
        first, second = world.subgroup(range(world.size)), world.subgroup(range(world.size))
        assert first is not None
        assert second is not None
        a, b, c = np.ones(1000), np.ones(2000), np.ones(3)
        order = [first, second] if world.rank % 2 else [second, first]
        works = [group.all_reduce(a if group is first else b, async_op=True) for group in order]
        world.all_reduce(c)
        for one in works:
            assert one is not None
            one.wait()
        assert a[0] == b[0] == c[0] == world.size
        first.close()
        world.all_reduce(c)
        second.barrier()
        second.close()

    ranks.threads(3, work)


@everywhere
def test_groups_within_groups() -> None:
    def work(world: un.Group) -> None:
        half = world.split(world.rank // 2)
        assert half is not None
        alone = half.split(half.rank)
        assert alone is not None
        assert (alone.size, alone.members) == (1, (world.rank,))
        alone.all_reduce(x := np.array([5.0]))
        assert x[0] == 5
        alone.close()
        half.close()

    ranks.threads(4, work)


@each(("chosen", "text"), [([], "at least one"), ([0, 0], "each once"), ([2], "rank 2 is not in group")])
@everywhere
def test_wrong_ranks(chosen: list[int], text: str) -> None:
    def work(world: un.Group) -> None:
        with pytest.raises(ValueError, match=text):
            world.subgroup(chosen)

    ranks.threads(2, work)


@everywhere
def test_messages_of_a_duplicate_are_apart() -> None:
    def work(group: un.Group) -> None:
        peer, x = 1 - group.rank, np.zeros(1)
        twin = group.duplicate()
        again = twin.duplicate()
        assert (twin.rank, twin.size, twin.members) == (group.rank, group.size, group.members)
        for number, one in enumerate((group, twin, again)):
            one.send(np.full(1, float(number)), peer, 3)
        assert again.iprobe(peer, un.ANY_TAG).tag == 3  # type: ignore[union-attr]
        for number, one in reversed(list(enumerate((group, twin, again)))):
            assert one.iprobe(peer, 2) is None
            assert one.recv(x, None, un.ANY_TAG).tag == 3
            assert x[0] == number
            work = one.irecv(x, peer, 7)
            assert "tag=7" in repr(work)
            assert work.cancel()
        with pytest.raises(ValueError, match="524287"):
            twin.send(x, peer, 1 << 19)
        assert twin.all_reduce(1) + again.all_reduce(1) + group.all_reduce(1) == 6
        pending = again.all_reduce(np.ones(1000), async_op=True)
        again.close()
        pending.wait()
        with pytest.raises(un.GroupClosed):
            again.barrier()
        assert twin.broadcast_object({1: 2}, 0) == {1: 2}
        with pytest.raises(un.NotSupported):
            twin.shrink()
        with twin:
            twin.barrier()
        group.barrier()

    ranks.threads(2, work)


def test_many_duplicates_take_no_descriptors_and_have_a_limit() -> None:
    def work(group: un.Group) -> None:
        before = len(os.listdir("/proc/self/fd"))
        first = [group.duplicate() for _ in range(20)]
        assert len(os.listdir("/proc/self/fd")) == before
        for one in first:
            one.close()
        kept = [group.duplicate() for _ in range(_native.MOST_CONTEXTS)]
        assert len({one.name for one in kept}) == len(kept)
        with pytest.raises(ValueError, match="4095 duplicates"):
            group.duplicate()
        kept.pop().close()
        peer, x = 1 - group.rank, np.zeros(1)
        last = group.duplicate()
        assert last.sendrecv(np.ones(1), peer, x, peer, tag=_native.MOST_CONTEXT_TAG).source == peer

    ranks.threads(2, work)
