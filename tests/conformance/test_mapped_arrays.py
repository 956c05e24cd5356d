"""Arrays of `un.empty`: every collective gives the same with them, and messages are read where they lie."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import cases
import effort
import inside
import operations
import oracle
import ranks
import unisono as un
from unisono.plans import ALGORITHMS, CONTRACTS, Plan, Send, make
from unisono.plans.provenance import Provenance
from unisono.plans.zero_copy import zero_copy_sends

NAMES = [
    (collective, name)
    for collective in ALGORITHMS
    if collective not in ("barrier", "exclusive_scan")  # no buffer; no choice of an algorithm
    for name in ALGORITHMS[collective]
]
MESSAGE = (
    32 * 1024 // 4
)  # elements: enough to be read in place, in one segment, and too few to be sent with zero copy
ROOT = 1
pytestmark = pytest.mark.needs("other processes")


def opened(group: un.Group) -> int:
    """Messages of others that this rank has read where they lay."""
    count: int = inside.engine(group).mapped_messages
    return count


@contextmanager
def some_in_place(group: un.Group) -> Iterator[None]:
    before = opened(group)
    yield
    assert opened(group) > before or group.size == 1


def call(group: un.Group, plan: Plan) -> None:
    """A call whose messages are all of MESSAGE elements."""
    collective, size, mine = plan.collective, group.size, group.rank == ROOT
    chosen = {"algorithm": plan.algorithm}
    x = un.empty(MESSAGE * plan.chunks("out"), np.float32)
    x[:] = 1
    block, blocks = un.empty(MESSAGE, np.float32), un.empty((size, MESSAGE), np.float32)
    block[:] = blocks[:] = 1
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: group.broadcast(x, ROOT, **chosen),
        "reduce": lambda: group.reduce(x, ROOT, **chosen),
        "all_reduce": lambda: group.all_reduce(x, **chosen),
        "scan": lambda: group.scan(x, **chosen),
        "gather": lambda: group.gather(block, blocks if mine else None, ROOT, **chosen),
        "scatter": lambda: group.scatter(block, blocks if mine else None, ROOT, **chosen),
        "all_gather": lambda: group.all_gather(blocks, block, **chosen),
        "reduce_scatter": lambda: group.reduce_scatter(block, blocks, **chosen),
        "all_to_all": lambda: group.all_to_all(un.empty((size, MESSAGE), np.float32), blocks, **chosen),
    }
    calls[collective]()


@pytest.mark.parametrize("size", effort.cases([2, 5], long=[4]))
def test_what_a_plan_exposes_is_read_in_place(size: int) -> None:
    """Of every algorithm, each message that may be, and no other."""
    plans = [
        make(collective, name, size, ROOT if CONTRACTS[collective].rooted else 0)
        for collective, name in NAMES
        if (collective, name) != ("all_reduce", "one_hop")  # in pieces: MESSAGE is more than a segment there
    ]
    expected = [[0] * size for _ in plans]
    for counts, plan in zip(expected, plans, strict=True):
        for rank, steps in enumerate(plan.steps):
            for step, open_ in zip(
                steps, zero_copy_sends(rank, Provenance(plan.steps.__getitem__)), strict=True
            ):
                for peer in step.to if isinstance(step, Send) and open_ else ():
                    counts[peer] += 1

    def work(group: un.Group) -> None:
        for counts, plan in zip(expected, plans, strict=True):
            before = opened(group)
            call(group, plan)
            assert opened(group) - before == counts[group.rank], (plan.collective, plan.algorithm)

    ranks.threads(size, work, cores=size)
    assert sum(map(sum, expected)) > 0


@pytest.mark.parametrize(("size", "crowded"), effort.crossed([2, 3, 5], [False, True]))
def test_results_are_those_of_other_arrays(size: int, crowded: bool) -> None:
    """Where ranks share cores only large messages are read in place."""

    def work(group: un.Group) -> None:
        with operations.arrays_from(un.empty), some_in_place(group):
            for numel in (13, 5000, 2 * cases.SEGMENT_BYTES // 4 + 5):
                for algorithm in ALGORITHMS["all_reduce"]:
                    cases.all_reduce(group, "float32", un.SUM, algorithm, numel)
                    cases.all_reduce(group, "float16", un.AVG, algorithm, numel)
                for algorithm in ALGORITHMS["reduce_scatter"]:
                    cases.reduce_scatter(group, "float32", un.SUM, algorithm, numel, in_place=False)
                    cases.reduce_scatter(group, "float32", un.SUM, algorithm, numel, in_place=True)
                cases.reduce(group, "float32", un.SUM, "direct", numel)
                cases.scans(group, "float32", un.SUM, "direct", numel)
                cases.moves(group, "float32", numel)
            cases.uneven(group)
            cases.in_flight(group)

    ranks.threads(size, work, cores=1 if crowded else size)


@pytest.mark.parametrize("size", [2, 5])
def test_blocks_of_the_output_among_the_input(size: int) -> None:
    """What is read in place lies beside what is written, and the other way round."""

    def work(group: un.Group) -> None:
        with operations.arrays_from(un.empty):
            for _ in range(3):
                with some_in_place(group):
                    cases.reduce_scatter(group, "float32", un.SUM, "direct", 100_000, in_place=True)
                whole = un.empty((size, 100_000), np.float32)
                whole[group.rank] = group.rank
                with some_in_place(group):
                    group.all_gather(whole, whole[group.rank], algorithm="direct")
                assert (whole == np.arange(size)[:, None]).all()

    ranks.threads(size, work, cores=size)


@pytest.mark.parametrize("size", [2, 5])
def test_premultiplied_sums(size: int) -> None:
    """What is multiplied on its way is no longer what lies there; results are."""

    def work(group: un.Group) -> None:
        rank, numel = group.rank, 100_000
        for algorithm in ALGORITHMS["all_reduce"]:
            x = un.empty(numel, np.float32)
            x[:] = np.arange(numel) % 1000
            before = opened(group)
            group.all_reduce(x, un.premul_sum(rank + 1.0), algorithm=algorithm)
            assert (x == np.arange(numel) % 1000 * (size * (size + 1) // 2)).all(), algorithm
            assert opened(group) > before or algorithm != "two_shot"
        for algorithm in ALGORITHMS["reduce_scatter"]:
            inputs = un.empty((size, numel), np.float32)
            inputs[:] = 2
            for out in (un.empty(numel, np.float32), inputs[rank]):
                group.reduce_scatter(out, inputs, un.premul_sum(rank + 1.0), algorithm=algorithm)
                assert (out == size * (size + 1)).all(), algorithm

    ranks.threads(size, work, cores=size)


def test_many_buffers_in_one_call() -> None:
    shapes = [3, 40_000, 0, 100_000, 1000]

    def arrays(rank: int) -> list[np.ndarray]:
        made = [un.empty(numel, np.float32) for numel in shapes]
        for number, array in enumerate(made):
            array[:] = rank + number
        return made

    def work(group: un.Group) -> None:
        size, rank = group.size, group.rank
        for async_op in (False, True):
            together = arrays(rank)
            with some_in_place(group):
                pending = group.all_reduce_coalesced(together, async_op=async_op)
                if pending is not None:
                    pending.wait()
            for number, array in enumerate(together):
                assert (array == sum(range(size)) + size * number).all()
            outs = [un.empty((size, numel), np.float32) for numel in shapes]
            with some_in_place(group):
                pending = group.all_gather_coalesced(outs, arrays(rank), async_op=async_op)
                if pending is not None:
                    pending.wait()
            for number, out in enumerate(outs):
                assert (out == np.arange(size)[:, None] + number).all()

    ranks.threads(3, work, cores=3)


@pytest.mark.parametrize("size", [2, 3])
def test_reproducible_sums_have_the_same_bits(size: int) -> None:
    numel = 150_001

    def data(rank: int) -> np.ndarray:
        rng = np.random.default_rng(rank)
        return (rng.standard_normal(numel) * 10.0 ** rng.uniform(-3, 3, numel)).astype(np.float32)

    expected = oracle.reduced([data(rank) for rank in range(size)], un.SUM)

    def work(group: un.Group) -> None:
        for make_array in (un.empty, np.empty):
            before = opened(group)
            x = make_array(numel, np.float32)
            x[:] = data(group.rank)
            group.all_reduce(x, reproducible=True)
            assert x.tobytes() == expected.tobytes()
            assert (opened(group) > before) == (make_array is un.empty)

    ranks.threads(size, work, cores=size)


def test_threads_read_through_a_view_of_their_own() -> None:
    """Memory that was given back is closed to its owner: who still reads it, as a thread, must not crash."""

    def work(group: un.Group) -> None:
        with operations.arrays_from(un.empty), some_in_place(group):
            cases.moves(group, "float32", 100_000)
        lines = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "unisono-arrays" in line
        ]
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        arena = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert sum(last - first for first, last in spans) >= 2 * arena

    ranks.threads(2, work, cores=2)
