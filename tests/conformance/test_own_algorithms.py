"""Algorithms that a program writes itself: proved, run, compared between ranks, refused when wrong."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import cases
from loops import each, everywhere
from unisono.engine.diagnosis import fault_reader
from unisono.errors import PlanError
from unisono.plans import Copy, In, Out, Recv, Reduce, Send, Tmp

Steps = Iterator[Send | Recv | Reduce | Copy]


def pass_on(rank: int, size: int, root: int) -> Steps:
    """To rank 0, which adds in the order of ranks; then from neighbour to neighbour."""
    if rank == 0:
        yield Reduce(Out(0), frm=tuple(range(size)))
    else:
        yield Send(Out(0), to=(0,))
        yield Recv(Out(0), frm=rank - 1)
    if rank + 1 < size:
        yield Send(Out(0), to=(rank + 1,))


def in_a_row(rank: int, size: int, root: int) -> Steps:
    """A running sum from neighbour to neighbour, whose last rank tells everybody; two chunks."""
    last = size - 1
    for chunk in (0, 1):
        yield Reduce(Out(chunk), frm=(rank - 1, rank) if rank else (0,))
        if rank < last:
            yield Send(Out(chunk), to=(rank + 1,))
            yield Recv(Out(chunk), frm=last)
        elif last:
            yield Send(Out(chunk), to=tuple(range(last)))


def star(rank: int, size: int, root: int) -> Steps:
    """The root tells each rank by itself."""
    if rank != root:
        yield Recv(Out(0), frm=root)
        return
    for peer in range(size):
        if peer != root:
            yield Send(Out(0), to=(peer,))


def star_reduce(rank: int, size: int, root: int) -> Steps:
    if rank != root:
        yield Send(Out(0), to=(root,))
    else:
        yield Reduce(Out(0), frm=tuple(range(size)))


def neighbours(rank: int, size: int, root: int) -> Steps:
    """Blocks go round."""
    yield Copy(Out(rank), In(0))
    for step in range(size - 1):
        yield Send(Out((rank - step) % size), to=((rank + 1) % size,))
        yield Recv(Out((rank - step - 1) % size), frm=(rank - 1) % size)


def everyone_meets(rank: int, size: int, root: int) -> Steps:
    yield Copy(Out(rank), In(rank))
    for step in range(1, size):
        yield Send(In((rank + step) % size), to=((rank + step) % size,))
        yield Recv(Out((rank - step) % size), frm=(rank - step) % size)


def prefix(rank: int, size: int, root: int) -> Steps:
    yield Reduce(Out(0), frm=(rank - 1, rank) if rank else (0,))
    if rank + 1 < size:
        yield Send(Out(0), to=(rank + 1,))


def scattered_sum(rank: int, size: int, root: int) -> Steps:
    for peer in range(size):
        if peer != rank:
            yield Send(In(peer), to=(peer,))
    yield Reduce(Out(0), frm=tuple(range(size)), own=In(rank))


def one(rank: int, numel: int, dtype: Any = np.float64) -> np.ndarray:
    return (np.arange(numel) % 7 + 3 * rank + 1).astype(dtype)


def check_all_reduce(group: un.Group, numel: int, steps: Callable[..., Steps]) -> None:
    for dtype in (np.float64, np.float16, np.int32):
        for op, fold in ((un.SUM, np.add.reduce), (un.MAX, np.maximum.reduce)):
            x = one(group.rank, numel, dtype)
            group.all_reduce(x, op, algorithm=steps)
            assert (x == fold([one(rank, numel, dtype) for rank in range(group.size)])).all()
    x = one(group.rank, numel)
    group.all_reduce(x, un.AVG, algorithm=steps)
    np.testing.assert_allclose(x, np.mean([one(rank, numel) for rank in range(group.size)], axis=0))
    x = one(group.rank, numel)
    group.all_reduce(x, un.premul_sum(2.0), algorithm=steps)
    assert (x == 2 * np.add.reduce([one(rank, numel) for rank in range(group.size)])).all()


def check_others(group: un.Group, numel: int) -> None:
    size, mine, last = group.size, one(group.rank, numel), group.size - 1
    everybody = np.array([one(rank, numel) for rank in range(size)])
    group.broadcast(x := mine.copy(), last, algorithm=star)
    assert (x == everybody[last]).all()
    group.reduce(x := mine.copy(), last, algorithm=star_reduce)
    assert (x == (everybody.sum(0) if group.rank == last else mine)).all()
    group.scan(x := mine.copy(), algorithm=prefix)
    assert (x == everybody[: group.rank + 1].sum(0)).all()
    assert (group.all_gather(mine, algorithm=neighbours) == everybody).all()
    blocks = everybody + 100 * group.rank
    swapped = group.all_to_all(blocks, algorithm=everyone_meets)
    assert (swapped == [mine + 100 * rank for rank in range(size)]).all()
    summed = group.reduce_scatter(blocks, algorithm=scattered_sum)
    assert (summed == sum(mine + 100 * rank for rank in range(size))).all()
    work = group.all_reduce(x := mine.copy(), algorithm=pass_on, async_op=True)
    work.wait()
    assert (x == everybody.sum(0)).all()


@each("size", cases([1, 4], long=[2, 3]))
@everywhere
def test_own_algorithms_do_what_numpy_does(size: int) -> None:
    def work(group: un.Group) -> None:
        for numel in (0, 1, 5, 4099, 100_000):
            for steps in (pass_on, in_a_row):
                check_all_reduce(group, numel, steps)
            check_others(group, numel)
        group.barrier(algorithm=star_barrier)

    def star_barrier(rank: int, size: int, root: int) -> Steps:
        yield from chain_of_tokens(rank, size)

    def chain_of_tokens(rank: int, size: int) -> Steps:
        if rank > 0:
            yield Reduce(Out(0), frm=(rank - 1, rank))
        if rank + 1 < size:
            yield Send(Out(0), to=(rank + 1,))
            yield Recv(Out(0), frm=size - 1)
        elif size > 1:
            yield Send(Out(0), to=tuple(range(size - 1)))

    ranks.threads(size, work)


def test_a_subgroup_runs_it_for_its_own_ranks() -> None:
    def work(group: un.Group) -> None:
        part = group.subgroup([3, 1, 0])
        if part is not None:
            with part:
                part.all_reduce(x := np.full(3, float(group.rank)), algorithm=pass_on)
                assert (x == 4).all()
        group.barrier()

    ranks.threads(4, work)


def test_reproducible_takes_only_what_combines_in_the_order_of_ranks() -> None:
    def work(group: un.Group) -> None:
        rng = np.random.default_rng(group.rank)
        x = (rng.standard_normal(4001) * 10.0 ** rng.uniform(-3, 3, 4001)).astype(np.float32)
        group.all_reduce(expected := x.copy(), reproducible=True)
        group.all_reduce(got := x.copy(), algorithm=pass_on, reproducible=True)
        assert (got == expected).all()
        with pytest.raises(ValueError, match="algorithm 'in_a_row' does not combine .* order of ranks"):
            group.all_reduce(x, algorithm=in_a_row, reproducible=True)
        group.reproducible = True
        with pytest.raises(ValueError, match="in_a_row"):
            group.all_reduce(x, algorithm=in_a_row)

    ranks.threads(3, work)


def forgets_one(rank: int, size: int, root: int) -> Steps:
    for step in pass_on(rank, size, root):
        yield Reduce(Out(0), frm=tuple(range(size - 1))) if isinstance(step, Reduce) else step


def circle(rank: int, size: int, root: int) -> Steps:
    yield Recv(Tmp(0), frm=(rank - 1) % size)
    yield Send(Out(0), to=((rank + 1) % size,))


def twice(rank: int, size: int, root: int) -> Steps:
    yield from pass_on(rank, size, root)
    yield from pass_on(rank, size, root)


def untouched(rank: int, size: int, root: int) -> Steps:
    """A scan whose rank 0 reduces nothing."""
    if rank > 0:
        yield Reduce(Out(0), frm=(rank - 1, rank))
    if rank + 1 < size:
        yield Send(Out(0), to=(rank + 1,))


def for_ever(rank: int, size: int, root: int) -> Steps:
    while True:
        yield Send(Out(0), to=((rank + 1) % size,))


@each(
    ("steps", "error", "reason"),
    [
        (forgets_one, PlanError, "never takes 1 of the messages that rank 2 sends"),
        (circle, PlanError, "deadlock: rank 0 waits for rank 2"),
        (twice, PlanError, "the contribution of rank 0 comes in twice"),
        (for_ever, ValueError, "there are more than"),
        (lambda rank, size, root: [], PlanError, "chunks|lacks"),
        (untouched, PlanError, r"Out\(0\) is as its rank gave it, and PREMUL_SUM would not multiply it"),
        (lambda rank, size, root: [Send(Out(0), to=(9,))], PlanError, "there is no rank 9"),
        (lambda rank, size, root: None, TypeError, "what it gives rank 0"),
        (lambda rank, size, root: ["Send"], TypeError, "got a str, expected Send, Recv, Reduce or Copy"),
        (lambda rank, size, root: [Send(3, to=(1,))], TypeError, "3 is no chunk"),
        (lambda rank, size, root: [Send(Out(-1), to=(1,))], TypeError, "is no chunk"),
        (lambda rank, size, root: [Recv(Out(0), frm="1")], TypeError, "are no ranks"),
        (lambda rank: [], TypeError, "positional argument"),
    ],
)
def test_wrong_own_algorithm_is_refused_and_the_group_goes_on(steps: Any, error: type, reason: str) -> None:
    def work(group: un.Group) -> None:
        x = np.full(4, group.rank + 1.0)
        for _ in range(2):
            with pytest.raises(error, match=reason):
                (group.scan if steps is untouched else group.all_reduce)(x, algorithm=steps)
        assert (x == group.rank + 1).all()
        group.all_reduce(x, algorithm=pass_on)
        assert (x == 6).all()

    ranks.threads(3, work)


def test_ranks_with_different_plans_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_reader, "SOURCE_LINE_PATIENCE_S", 20)

    def work(group: un.Group) -> None:
        steps = pass_on if group.rank else in_a_row
        for again in (pass_on, in_a_row, pass_on):
            group.all_reduce(np.ones(3), algorithm=again)
        with pytest.raises(un.Mismatch) as caught:
            group.all_reduce(np.ones(3), algorithm=steps)
        text = str(caught.value)
        assert "algorithm pass_on, plan " in text
        assert "algorithm in_a_row, plan " in text
        assert "The plans of their algorithms differ." in text

    ranks.threads(3, work)


def test_a_plan_of_ones_own_meets_none_of_the_catalogue() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch, match=r"algorithm=ring"):
            group.all_reduce(np.ones(3), algorithm="ring" if group.rank else pass_on)

    ranks.threads(2, work)


def test_functions_that_say_the_same_may_meet() -> None:
    def work(group: un.Group) -> None:
        def mine(rank: int, size: int, root: int) -> Steps:
            yield from pass_on(rank, size, root)

        group.all_reduce(x := np.ones(3), algorithm=mine)
        assert (x == group.size).all()

    ranks.threads(3, work)


def test_own_algorithm_is_lowered_once_per_group() -> None:
    def work(group: un.Group) -> None:
        asked = []

        def counted(rank: int, size: int, root: int) -> Steps:
            asked.append(rank)
            yield from pass_on(rank, size, root)

        for numel in (1, 1, 5, 5000):
            group.all_reduce(np.ones(numel), algorithm=counted)
        group.all_reduce(np.ones(5, np.int32), un.MAX, algorithm=counted)
        assert sorted(asked) == list(range(group.size))

    ranks.threads(3, work)


def test_an_algorithm_that_holds_its_group_does_not_keep_it() -> None:
    seen = used_and_forgotten()
    gc.collect()
    assert seen() is None


def used_and_forgotten() -> weakref.ref[un.Group]:
    (group,) = ranks.groups(1)

    def held(rank: int, size: int, root: int) -> Steps:
        assert group.size == size
        yield from pass_on(rank, size, root)

    for _ in range(2):
        group.all_reduce(np.ones(3), algorithm=held)
    return weakref.ref(group)
