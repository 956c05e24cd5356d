"""Every collective x op x dtype x size x ranks against NumPy, ranks as threads over the real engine."""

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cases
import effort
import oracle
import ranks
import unisono as un
from loops import each
from unisono.plans import ALGORITHMS

RANKS = effort.cases([1, 2, 5], long=[3, 8])  # the random programs take 1 to 9, test_placements.py 4 to 7
LARGE = effort.cases(
    [("float32", un.SUM), ("bfloat16", un.SUM)],
    long=[("complex64", un.SUM), ("float64", un.AVG), ("int8", un.MAX)],
)
NUMELS = effort.cases([0, 13, 1000], long=[1])


@each("size", RANKS)
def test_all_reduce_of_every_dtype_and_op(size: int) -> None:
    """Each pair by every third algorithm, by all with the long tests."""
    algorithms, step = [*ALGORITHMS["all_reduce"]], effort.times(usual=3, long=1)

    def work(group: un.Group) -> None:
        for number, (dtype, op) in enumerate(oracle.pairs()):
            for numel in cases.FEW:
                for algorithm in algorithms[(number + size) % step :: step]:
                    cases.all_reduce(group, dtype, op, algorithm, numel)

    ranks.threads(size, work)


@each("size", RANKS)
def test_all_reduce_around_boundaries(size: int) -> None:
    def work(group: un.Group) -> None:
        for dtype, op in LARGE:
            for numel in cases.sizes(oracle.NUMPY_DTYPES[dtype].itemsize, size):
                for algorithm in ALGORITHMS["all_reduce"]:
                    cases.all_reduce(group, dtype, op, algorithm, numel)

    ranks.threads(size, work)


@each("size", RANKS)
def test_rooted_and_scattering_reductions(size: int) -> None:
    def work(group: un.Group) -> None:
        for (dtype, op), numel in effort.crossed(oracle.pairs(), NUMELS):
            cases.reductions(group, dtype, op, numel, numel == 13)

    ranks.threads(size, work)


@each("size", RANKS)
def test_rooted_and_scattering_reductions_of_several_segments(size: int) -> None:
    def work(group: un.Group) -> None:
        for numel in (cases.SEGMENT_BYTES // 4 + 1, 2 * cases.SEGMENT_BYTES // 4 + 5):
            cases.reductions(group, "float32", un.SUM, numel, False, True)

    ranks.threads(size, work)


@each("size", RANKS)
def test_moving_operations(size: int) -> None:
    def work(group: un.Group) -> None:
        for dtype, numel in effort.crossed([*oracle.NUMPY_DTYPES], NUMELS):
            cases.moves(group, dtype, numel)
        for numel in (cases.SEGMENT_BYTES // 4 + 1, 2 * cases.SEGMENT_BYTES // 4 + 5):
            cases.moves(group, "float32", numel)

    ranks.threads(size, work)


@pytest.mark.parametrize("segment_bytes", [1 << 12, 1 << 20])
def test_segments_of_other_sizes(segment_bytes: int) -> None:
    """As on machines with smaller and larger caches."""

    def work(group: un.Group) -> None:
        for numel in (segment_bytes // 4 - 1, segment_bytes // 4 + 1, 2 * segment_bytes // 4 + 5):
            for algorithm in ALGORITHMS["all_reduce"]:
                cases.all_reduce(group, "float32", un.SUM, algorithm, numel)
            cases.moves(group, "float32", numel)

    ranks.threads(3, work, segment_bytes=segment_bytes)


@each("size", RANKS)
def test_uneven_blocks(size: int) -> None:
    ranks.threads(size, cases.uneven)


@each("size", RANKS)
def test_many_operations_in_flight(size: int) -> None:
    ranks.threads(size, cases.in_flight)


@pytest.mark.parametrize("size", [2, 4])
def test_64_mebibytes(size: int) -> None:
    def work(group: un.Group) -> None:
        x = np.full(16 << 20, group.rank + 1, np.float32)
        group.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()

    ranks.threads(size, work)


@each("size", RANKS)
def test_premultiplied_sum(size: int) -> None:
    def work(group: un.Group) -> None:
        for dtype in ("float32", "float64", "complex64", "float16", "bfloat16"):
            for algorithm in ALGORITHMS["all_reduce"]:
                x = np.full(1000, 2.0, oracle.NUMPY_DTYPES[dtype])
                group.all_reduce(x, un.premul_sum(0.5), algorithm=algorithm)
                assert (x == size).all(), (dtype, algorithm)
        for algorithm in ALGORITHMS["reduce_scatter"]:
            inputs, out = np.full((size, 10), 2.0), np.empty(10)
            group.reduce_scatter(out, inputs, un.premul_sum(1 + group.rank), algorithm=algorithm)
            assert (out == size * (size + 1)).all()
            assert (inputs == 2).all()
        for algorithm in ALGORITHMS["reduce"]:
            x = np.full(10, 2.0)
            group.reduce(x, 0, un.premul_sum(3.0), algorithm=algorithm)
            assert (x == (6.0 * size if group.rank == 0 else 2.0)).all()

    ranks.threads(size, work)


def test_nan_and_infinity_come_through() -> None:
    def work(group: un.Group) -> None:
        for dtype in oracle.FLOATS:
            for op in (un.MIN, un.MAX, un.SUM, un.AVG):
                x = np.array([1.0, np.inf, -np.inf, group.rank], oracle.NUMPY_DTYPES[dtype])
                if group.rank == 1:
                    x[0] = np.nan
                group.all_reduce(x, op)
                assert np.isnan(x[0]), (dtype, op)
                assert np.isposinf(x[1].astype(float)), (dtype, op)
                assert np.isneginf(x[2].astype(float)), (dtype, op)

    ranks.threads(3, work)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_round_as_numpy_does(dtype: str) -> None:
    """All 65536 patterns come through unchanged, and sums are rounded as NumPy rounds them."""
    patterns = np.arange(65536, dtype=np.uint16).view(oracle.NUMPY_DTYPES[dtype])
    halves = np.linspace(-70000, 70000, 100_001).astype(np.float32)
    with np.errstate(over="ignore"):
        sums = (halves.astype(oracle.NUMPY_DTYPES[dtype]), (halves * 1e-3).astype(oracle.NUMPY_DTYPES[dtype]))

    @np.errstate(over="ignore", invalid="ignore")  # a thread's own; ARM tells a cast of a signalling NaN
    def work(group: un.Group) -> None:
        x = patterns.copy()
        group.all_reduce(x, un.MAX)
        nan = np.isnan(patterns.astype(np.float32))
        assert (np.isnan(x.astype(np.float32)) == nan).all()
        assert (x.view(np.uint16)[~nan] == patterns.view(np.uint16)[~nan]).all()
        y = sums[group.rank].copy()
        group.all_reduce(y)
        oracle.check(y, oracle.reduced(list(sums), un.SUM), True, dtype, 2, "sum")

    ranks.threads(2, work)


def test_scalar_sizes_shapes_and_other_buffers() -> None:
    def work(group: un.Group) -> None:
        zero_d = np.array(float(group.rank + 1))
        group.all_reduce(zero_d)
        assert zero_d == 3
        matrix = np.full((3, 4, 5), group.rank + 1, np.int32)
        group.all_reduce(matrix)
        assert (matrix == 3).all()
        octets = bytearray([group.rank + 1] * 10)
        group.all_reduce(octets)
        assert octets == bytearray([3] * 10)
        view = memoryview(np.full(4, group.rank + 1.0))
        group.all_reduce(view)
        assert view[0] == 3

    ranks.threads(2, work)


def test_reduce_scatter_then_all_gather_is_all_reduce_bit_for_bit() -> None:
    def work(group: un.Group) -> None:
        rng = np.random.default_rng(group.rank)
        x = rng.standard_normal((group.size, 5000)).astype(np.float32)
        out, whole = np.empty(5000, np.float32), np.empty_like(x)
        group.reduce_scatter(out, x)
        group.all_gather(whole, out)
        for algorithm in ("one_shot", "two_shot"):
            y = x.copy()
            group.all_reduce(y, algorithm=algorithm)
            assert y.tobytes() == whole.tobytes()

    ranks.threads(5, work)


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    came: list[float] = []
    left: list[float] = []

    def work(group: un.Group) -> None:
        time.sleep(0.1 * group.rank)
        came.append(time.monotonic())
        group.barrier()
        left.append(time.monotonic())

    ranks.threads(3, work)
    assert min(left) >= max(came)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_16_bit_floats_round_once(dtype: Any) -> None:
    """1 + three halves of the last place: rounding at every step would lose them all."""
    half = float(np.finfo(np.float16).eps if dtype == "float16" else ml_dtypes.finfo(dtype).eps) / 2

    def work(group: un.Group) -> None:
        x = np.array([half if group.rank else 1.0], dtype)
        group.all_reduce(x)
        assert float(x[0]) == 1 + 4 * half  # 1 + 3 halves, rounded to even once

    ranks.threads(4, work)


@each("algorithm", ["one_shot", "two_shot", "ring", "binomial"])
def test_every_rank_has_the_same_bits(algorithm: str) -> None:
    def work(group: un.Group) -> bytes:
        x = oracle.data(group.rank, 1001, "float32").copy()
        group.all_reduce(x, algorithm=algorithm)
        return x.tobytes()

    assert len(set(ranks.threads(5, work))) == 1
