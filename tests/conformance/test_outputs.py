"""`out=` of reductions: the results of reducing a copy in place, and inputs that do not change."""

from typing import Any

import numpy as np
import pytest

import oracle
import ranks
import unisono as un
from loops import each
from unisono.plans import ALGORITHMS

NUMELS = (0, 1, 5, 1000, 150_001, 600_000)
CALLS = ("all_reduce", "reduce", "scan", "exclusive_scan")


def values(rank: int, numel: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).integers(1, 9, numel).astype(oracle.NUMPY_DTYPES[dtype])


def expected(group: un.Group, call: str, x: np.ndarray, out: np.ndarray, **options: Any) -> np.ndarray:
    """What `out` has to hold afterwards."""
    copy = x.copy()
    getattr(group, call)(copy, **options)
    kept = (call == "reduce" and group.rank != options["dst"]) or (
        call == "exclusive_scan" and not group.rank
    )
    return out.copy() if kept else copy


def compare(group: un.Group, call: str, numel: int, dtype: str = "float32", **options: Any) -> None:
    if call == "reduce":
        options["dst"] = group.size - 1
    mine = values(group.rank, numel, dtype)
    x, out = mine.copy(), np.full_like(mine, 77)
    wanted = expected(group, call, x, out, **options)
    x.flags.writeable = False
    for later in (False, False, True):  # from the second one on they are remembered
        out[...] = 77
        work = getattr(group, call)(x, out=out, async_op=later, **options)
        if later:
            work.wait()
        assert x.tobytes() == mine.tobytes(), (call, numel, options)
        assert out.tobytes() == wanted.tobytes(), (call, numel, options)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_one_host(size: int) -> None:
    def work(group: un.Group) -> None:
        for call in CALLS:
            for algorithm in (None, *ALGORITHMS[call]):
                for numel in NUMELS if algorithm is None else NUMELS[2:5]:
                    compare(group, call, numel, algorithm=algorithm)
            for dtype, op in (("bfloat16", un.SUM), ("int8", un.MAX), ("float64", un.premul_sum(0.5))):
                compare(group, call, 5000, dtype, op=op)
            compare(group, call, 5000, "float64", op=un.op(np.add))
            compare(group, call, 5000, reproducible=True)
        compare(group, "all_reduce", 999, op=un.AVG)

    ranks.threads(size, work, cores=size)


@pytest.mark.parametrize(("size", "per_host"), [(3, 1), (5, 2)])
def test_between_hosts(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for call in CALLS:
            for algorithm in (None, *ALGORITHMS[call]):
                for numel in (1, 1000, 150_001):
                    compare(group, call, numel, algorithm=algorithm)
            compare(group, call, 5000, op=un.premul_sum(2.0))
            compare(group, call, 50_000, "float64", op=un.op(np.maximum))

    ranks.threads(size, work, per_host=per_host)


def test_arrays_that_others_read_in_place() -> None:
    def work(group: un.Group) -> None:
        x, out = un.empty(300_000, np.float32), un.empty(300_000, np.float32)
        for turn in range(5):
            x[...] = group.rank + turn
            group.all_reduce(x, out=out)
            assert (x == group.rank + turn).all() and (out == 3 + 3 * turn).all()

    ranks.threads(3, work)


def test_out_may_be_x() -> None:
    def work(group: un.Group) -> None:
        x = np.array([1.0, group.rank])
        for _ in range(2):
            group.all_reduce(x, out=x)
        assert x.tolist() == [4.0, 2.0]

    ranks.threads(2, work)


WRONG = {
    "longer": (lambda x: (x, np.zeros(5)), {}, "they must agree"),
    "dtype": (lambda x: (x, np.zeros(4, np.float32)), {}, "they must agree"),
    "overlap": (lambda x: (x[:3], x[1:]), {}, "overlap"),
    "read-only": (lambda x: (x, np.frombuffer(bytes(32))), {}, "read-only"),
    "codec": (
        lambda x: (x.astype("f4"), np.zeros(4, "f4")),
        {"codec": "bf16"},
        "out= does not go with codec=",
    ),
    "function": (lambda x: (x, np.zeros(4)), {"algorithm": lambda *_: ()}, "an algorithm of your own"),
    "number": (lambda x: (3.0, np.zeros(1)), {}, "x is a float"),
}


@each("name", list(WRONG))
def test_wrong_outputs(name: str) -> None:
    make, options, text = WRONG[name]

    def work(group: un.Group) -> None:
        x, out = make(np.ones(4))
        with pytest.raises((ValueError, TypeError), match=text):
            group.all_reduce(x, out=out, **options)
        assert group.all_reduce(1) == 2

    ranks.threads(2, work)
