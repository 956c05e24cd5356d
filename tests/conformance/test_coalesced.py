"""C20: many buffers in one call give what one call for each gives."""

from typing import Any

import numpy as np
import pytest

import oracle
import ranks
import unisono as un
from loops import each

SHAPES = [
    ("float32", 3),
    ("int64", 5),
    ("float32", 0),
    ("float32", 40_000),
    ("bfloat16", 17),
    ("float32", 1000),
]


def buffers(rank: int, blocks: int = 1) -> list[np.ndarray]:
    return [
        oracle.data(rank, numel * blocks, dtype, seed=seed).copy().reshape(blocks, numel)
        for seed, (dtype, numel) in enumerate(SHAPES)
    ]


def equal(found: list[Any], expected: list[Any], rtol: float = 0) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol)


@pytest.mark.parametrize("async_op", [False, True])
def test_each_gives_what_single_calls_give(async_op: bool) -> None:
    def work(group: un.Group) -> None:
        size, rank = group.size, group.rank
        engine = type(group) is un.Group
        rtol = 0 if engine else 1e-2  # MPI may combine contributions in the order in which they come

        def wait(one: un.Work | None) -> None:
            assert (one is not None) == async_op
            if one is not None:
                one.wait()

        together, single = buffers(rank), buffers(rank)
        before = group.sequence
        wait(group.all_reduce_coalesced(together, async_op=async_op))
        assert group.sequence - before == 4 or not engine, "three dtypes, and one that is large"
        for x in single:
            group.all_reduce(x)
        equal(together, single, rtol)

        together = buffers(rank)
        wait(group.broadcast_coalesced(together, 1, async_op=async_op))
        equal(together, buffers(1))

        outs = [np.zeros((size, x.size), x.dtype) for x in buffers(0)]
        wait(group.all_gather_coalesced(outs, buffers(rank), async_op=async_op))
        equal(outs, [np.concatenate(parts) for parts in zip(*map(buffers, range(size)), strict=True)])

        inputs, single = buffers(rank, size), buffers(rank)
        outs = [np.zeros_like(x) for x in single]
        wait(group.reduce_scatter_coalesced(outs, inputs, async_op=async_op))
        for x, block in zip(single, inputs, strict=True):
            group.reduce_scatter(x, block)
        equal(outs, single, rtol)
        equal(inputs, buffers(rank, size))

    ranks.threads(3, work)


def test_own_blocks_and_lists_of_blocks() -> None:
    def work(group: un.Group) -> None:
        outs = [np.zeros((2, 3)), [np.zeros(2), np.zeros(2)]]
        outs[0][group.rank] = group.rank + 1
        group.all_gather_coalesced(outs, [outs[0][group.rank], np.full(2, group.rank + 5.0)])
        equal([outs[0], np.stack(outs[1])], [[[1] * 3, [2] * 3], [[5] * 2, [6] * 2]])
        inputs = [np.ones((2, 3)), np.ones((2, 2))]
        group.reduce_scatter_coalesced([inputs[0][group.rank], y := np.zeros(2)], inputs)
        equal([inputs[0][group.rank], inputs[0][1 - group.rank], y], [[2] * 3, [1] * 3, [2, 2]])

    ranks.threads(2, work)


def test_nothing_and_everything_at_once() -> None:
    def work(group: un.Group) -> None:
        group.all_reduce_coalesced([])
        done = group.all_reduce_coalesced([], async_op=True)
        assert done is not None
        done.wait()
        many = [np.full(50, number, np.float32) for number in range(7000)]  # more than travels together
        group.all_reduce_coalesced(many)
        assert all((x == 2 * number).all() for number, x in enumerate(many))
        frozen = np.ones(3)
        frozen.flags.writeable = group.rank == 1
        group.broadcast_coalesced([frozen, np.ones(2)], 0)

    ranks.threads(2, work)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (
        lambda g: g.all_reduce_coalesced([np.ones(3), [1]]),
        TypeError,
        r"all_reduce_coalesced: xs\[1\] is a list",
    ),
    (
        lambda g: (lambda x: g.all_reduce_coalesced([x[:3], x[2:]]))(np.ones(5)),
        ValueError,
        "overlap in memory",
    ),
    (lambda g: g.all_gather_coalesced([np.ones((2, 1))], []), ValueError, "1 outputs and 0 inputs"),
    (
        lambda g: g.all_gather_coalesced([np.ones((2, 1)), np.ones(3)], [np.ones(1), np.ones(1)]),
        ValueError,
        "all_gather_coalesced: buffers 1: out has 3 elements",
    ),
    (
        lambda g: (lambda x: g.reduce_scatter_coalesced([x[4:6], np.ones(2)], [np.ones(4), x[2:6]]))(
            np.ones(9)
        ),
        ValueError,
        "overlap in memory",
    ),
    (
        lambda g: g.all_reduce_coalesced([np.ones(1), np.ones(1, bool)], un.AVG),
        TypeError,
        "AVG has no meaning",
    ),
]


@each(("call", "error", "text"), WRONG)
def test_wrong_arguments_are_refused_before_anything_runs(call: Any, error: Any, text: str) -> None:
    def work(group: un.Group) -> None:
        before = group.sequence
        with pytest.raises(error, match=text):
            call(group)
        assert group.sequence == before

    ranks.threads(2, work)


def test_sizes_that_only_add_up_are_a_mismatch() -> None:
    def work(group: un.Group) -> None:
        sizes = (2, 3) if group.rank else (3, 2)
        with pytest.raises(un.Mismatch, match="differ in order, sizes or dtypes"):
            group.all_reduce_coalesced([np.ones(numel) for numel in sizes])

    ranks.threads(2, work)
