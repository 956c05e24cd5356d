"""C19: the same bits whatever the size of the buffer, the algorithm, the staging memory and the segments."""

from functools import lru_cache

import numpy as np
import pytest

import oracle
import ranks
import unisono as un
from loops import each
from unisono.plans import ALGORITHMS, make, prove

FLOATS = ("float32", "float16", "bfloat16")
LONGEST = 150_001


def wild(rank: int, numel: int, dtype: str) -> np.ndarray:
    """Numbers of many magnitudes and signs, which no two orders of adding give the same sum of."""
    return _wild(rank, dtype)[:numel].copy()


@lru_cache(maxsize=64)
def _wild(rank: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(rank)
    spread = 10.0 ** rng.uniform(-3, 3, LONGEST) * rng.choice([-1, 1], LONGEST)
    return spread.astype(oracle.NUMPY_DTYPES[dtype])


def canonical(collective: str, size: int) -> list[str]:
    return [name for name in ALGORITHMS[collective] if prove(make(collective, name, size)).canonical]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("staging_bytes", [1 << 16, 1 << 20])
def test_bits_are_those_of_a_fold_in_the_order_of_ranks(size: int, staging_bytes: int) -> None:
    whole = {
        dtype: oracle.reduced([wild(rank, LONGEST, dtype) for rank in range(size)], un.SUM)
        for dtype in FLOATS
    }

    def work(group: un.Group) -> None:
        for dtype, expected in whole.items():
            for numel in (1, 7, 1000, LONGEST):
                for algorithm in [None, *canonical("all_reduce", size)]:
                    x = wild(group.rank, numel, dtype)
                    group.all_reduce(x, algorithm=algorithm, reproducible=True)
                    assert x.tobytes() == expected[:numel].tobytes(), (dtype, numel, algorithm)
                x = wild(group.rank, numel, dtype)
                group.reduce(x, size - 1, reproducible=True)
                assert group.rank < size - 1 or x.tobytes() == expected[:numel].tobytes()

    ranks.threads(size, work, staging_bytes=staging_bytes)


def test_pieces_have_the_bits_of_the_whole() -> None:
    """However a buffer is cut into calls, its elements come out the same."""
    size, numel = 4, 6000

    def work(group: un.Group) -> None:
        whole = wild(group.rank, numel, "float32")
        pieces = [wild(group.rank, numel, "float32")[cut : cut + 500] for cut in range(0, numel, 500)]
        block = np.empty(numel // size, np.float32)
        group.reduce_scatter(block, whole.reshape(size, -1), reproducible=True)
        group.all_reduce(whole, reproducible=True)
        group.all_reduce_coalesced(pieces, reproducible=True)
        assert np.concatenate(pieces).tobytes() == whole.tobytes()
        assert block.tobytes() == whole.reshape(size, -1)[group.rank].tobytes()

    ranks.threads(size, work)


def test_scans_are_folds_too() -> None:
    def work(group: un.Group) -> None:
        parts = [wild(rank, 1000, "bfloat16") for rank in range(group.size)]
        x, y = parts[group.rank].copy(), parts[group.rank].copy()
        group.scan(x, reproducible=True)
        group.exclusive_scan(y, reproducible=True)
        assert x.tobytes() == oracle.reduced(parts[: group.rank + 1], un.SUM).tobytes()
        if group.rank:
            assert y.tobytes() == oracle.reduced(parts[: group.rank], un.SUM).tobytes()

    ranks.threads(4, work)


@each("whole_group", [True, False])
def test_algorithms_of_another_order_are_refused(whole_group: bool) -> None:
    def work(group: un.Group) -> None:
        group.reproducible = whole_group
        argument = {} if whole_group else {"reproducible": True}
        for algorithm in ("ring", "binomial"):
            with pytest.raises(ValueError, match=f"all_reduce: algorithm '{algorithm}' does not .* one_shot"):
                group.all_reduce(np.ones(3), algorithm=algorithm, **argument)
        with pytest.raises(ValueError, match="reduce_scatter: algorithm 'ring'"):
            group.reduce_scatter(np.ones(1), np.ones((3, 1)), algorithm="ring", **argument)
        group.broadcast(np.ones(3), algorithm="binomial")
        group.barrier()
        group.all_reduce(x := np.ones(3), **argument)
        assert (x == 3).all()

    ranks.threads(3, work)


def test_a_group_is_reproducible_by_itself_and_so_are_its_subgroups() -> None:
    def work(group: un.Group) -> None:
        group.all_reduce(np.ones(3, np.float32))
        group.reproducible = True
        half = group.split(group.rank % 2)
        assert half is not None
        assert half.reproducible
        parts = [wild(rank, 1000, "float16") for rank in range(group.size)]
        x = parts[group.rank].copy()
        group.all_reduce(x)
        assert x.tobytes() == oracle.reduced(parts, un.SUM).tobytes()
        half.close()

    ranks.threads(4, work)
