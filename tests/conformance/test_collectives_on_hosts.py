"""Every collective over edges of both kinds: ranks apart, and in uneven hosts, against NumPy."""

import time

import numpy as np
import pytest

import cases
import oracle
import ranks
import unisono as un
from unisono.plans import ALGORITHMS

LAYOUTS = [(2, 1), (3, 1), (5, 2)]  # ranks, and how many of them share a host
PAIRS = [
    ("float32", un.SUM),
    ("bfloat16", un.SUM),
    ("float64", un.AVG),
    ("int8", un.MAX),
    ("complex64", un.PRODUCT),
]


@pytest.mark.parametrize(("size", "per_host"), LAYOUTS)
def test_all_reduce(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for dtype, op in PAIRS:
            itemsize = oracle.NUMPY_DTYPES[dtype].itemsize
            for numel in cases.sizes(itemsize, size) if dtype == "float32" else cases.FEW:
                for algorithm in ALGORITHMS["all_reduce"]:
                    cases.all_reduce(group, dtype, op, algorithm, numel)
        for algorithm in ALGORITHMS["all_reduce"]:
            cases.all_reduce(group, "float32", un.SUM, algorithm, 900_001)
            x = np.full(1000, 2.0)
            group.all_reduce(x, un.premul_sum(0.5), algorithm=algorithm)
            assert (x == size).all(), algorithm

    ranks.threads(size, work, per_host=per_host)


@pytest.mark.parametrize(("size", "per_host"), LAYOUTS)
def test_rooted_and_scattering_reductions(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for dtype, op in PAIRS:
            for numel in (0, 13, 1000, 300_000) if dtype == "float32" else (13, 1000):
                cases.reductions(group, dtype, op, numel, numel == 13)

    ranks.threads(size, work, per_host=per_host)


@pytest.mark.parametrize(("size", "per_host"), LAYOUTS)
def test_moving_operations(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for dtype, numel in (("float32", 0), ("int8", 1), ("float64", 1000), ("float32", 300_000)):
            cases.moves(group, dtype, numel)
        cases.uneven(group)
        cases.in_flight(group)

    ranks.threads(size, work, per_host=per_host)


def test_hosts_have_names() -> None:
    def work(group: un.Group) -> None:
        names = [group.host_of(rank) for rank in range(5)]
        assert names[0] == names[1] != names[2] == names[3] != names[4]

    ranks.threads(5, work, per_host=2)


@pytest.mark.parametrize("size", [2, 3])
def test_small_buffers_in_the_kernel(size: int) -> None:
    """All ranks send at once far more than the kernel holds; nobody may wait for the others to receive."""

    def work(group: un.Group) -> None:
        for algorithm in ("two_shot", "ring"):
            cases.all_reduce(group, "float32", un.SUM, algorithm, 400_003)
        cases.moves(group, "float64", 50_000)
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        mine, got = np.full(300_000, group.rank, np.float64), np.empty(300_000)
        reducing = group.all_reduce(x := np.ones(300_000), async_op=True)
        group.send(mine, right)
        group.recv(got, left)
        assert reducing is not None
        reducing.wait()
        assert (got == left).all()
        assert (x == size).all()

    ranks.threads(size, work, per_host=1, socket_bytes=32768)


def test_message_to_a_rank_that_comes_late() -> None:
    """A sender is not done before the kernel has all; the receiver sleeps longer than a lost host may."""

    def work(group: un.Group) -> None:
        if group.rank:
            time.sleep(1.5)
        x = np.full(1_000_000, group.rank)
        group.broadcast(x, 0)
        assert not x.any()

    ranks.threads(2, work, per_host=1, socket_bytes=32768, peer_timeout_s=1.0)
