"""all_reduce with codec=un.LowRank, against PowerSGD of all ranks' matrices in one process, in f64."""

import math
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from loops import each
from unisono.codecs.low_rank import NumPyArrays, random_factor


def matrix(rank: int, call: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([rank, call])
    n, m = shape[0], math.prod(shape[1:])
    low = rng.standard_normal((n, 3)) @ rng.standard_normal((3, m))
    return (low + 0.1 * rng.standard_normal((n, m))).astype(np.float32).reshape(shape)


class Reference:
    """The paper's algorithm: the mean of the matrices that all ranks gave, and each one's error."""

    def __init__(self, rows: int, columns: int, rank: int, size: int) -> None:
        self.q = random_factor(NumPyArrays(), "matrix", columns, rank, 0, 0).T.astype(float)
        self.errors = np.zeros((size, rows, columns))

    def __call__(self, matrices: list[np.ndarray]) -> np.ndarray:
        inputs = np.stack([x.astype(float).reshape(self.errors[0].shape) for x in matrices]) + self.errors
        p, _ = np.linalg.qr(inputs.mean(0) @ self.q)
        second = inputs.mean(0).T @ p
        result: np.ndarray = p @ second.T
        self.q, self.errors = np.linalg.qr(second)[0], inputs - result
        return result


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one.ravel() - other.ravel()) / np.linalg.norm(other))


@each("size", [1, 2, 3, 4])
@each("shape", [(40, 60), (64, 3, 8), (7, 5)])
@each("factors", ["f32", "bf16"])
@each("per_host", [0, 2])
def test_it_is_the_papers(size: int, shape: tuple[int, ...], factors: str, per_host: int) -> None:
    codec = un.LowRank(rank=4, factors=factors)
    flat = shape[0], math.prod(shape[1:])

    def work(group: un.Group) -> None:
        reference, kept = Reference(*flat, 4, group.size), None
        for call in range(5):
            x = matrix(group.rank, call, shape)
            kept = kept or codec.feedback_for(x)
            group.all_reduce(x, un.AVG, codec=codec, feedback=kept)
            wanted = reference([matrix(rank, call, shape) for rank in range(group.size)])
            assert distance(x, wanted) < (1e-4 if factors == "f32" else 5e-2), call
            assert len(set(group.all_gather_object(x.tobytes()))) == 1
        assert kept is not None and kept.calls == 5
        assert distance(kept.error, reference.errors[group.rank]) < (1e-3 if factors == "f32" else 0.3)
        x, y = (matrix(group.rank, 9, shape) for _ in range(2))
        group.all_reduce(x, codec=codec)
        group.all_reduce(y, un.AVG, codec=codec)
        assert distance(x, y * np.float32(group.size)) < 1e-6

    ranks.threads(size, work, per_host=per_host)


def test_feedback_sends_the_error_later() -> None:
    """The mean of many results is that of the inputs; without feedback it is not."""
    shape, calls = (30, 50), 60

    def work(group: un.Group) -> None:
        codec, errors = un.LowRank(rank=4), {}
        exact = sum(np.random.default_rng(r).standard_normal(shape) for r in range(group.size)) / group.size
        for name in ("kept", "dropped"):
            total, kept = np.zeros(shape), codec.feedback_for(exact) if name == "kept" else None
            for _ in range(calls):
                x = np.random.default_rng(group.rank).standard_normal(shape).astype(np.float32)
                group.all_reduce(x, un.AVG, codec=codec, feedback=kept)
                total += x
            errors[name] = distance(total / calls, exact)
        assert errors["kept"] < 0.2 < 0.8 < errors["dropped"], errors

    ranks.threads(3, work)


def test_full_rank_is_exact_within_rounding() -> None:
    def work(group: un.Group) -> None:
        x = matrix(group.rank, 0, (20, 12))
        group.all_reduce(x, codec=un.LowRank(rank=1000))
        assert distance(x, matrix(0, 0, (20, 12)) + matrix(1, 0, (20, 12))) < 1e-5

    ranks.threads(2, work)


def test_bytes() -> None:
    assert un.LowRank(rank=4).nbytes((1024, 4096)) == 80 * 1024
    assert un.LowRank(rank=4, factors="bf16").nbytes((1024, 64, 64)) == 40 * 1024
    assert un.LowRank(rank=100).nbytes((3, 5)) == 4 * 3 * 8


def test_what_is_not_finite_is_nan_everywhere_and_leaves_the_error() -> None:
    def work(group: un.Group) -> None:
        codec = un.LowRank(rank=2)
        x = matrix(group.rank, 0, (10, 10))
        kept = codec.feedback_for(x)
        group.all_reduce(x, codec=codec, feedback=kept)
        before = kept.error.copy()
        x = matrix(group.rank, 1, (10, 10))
        if group.rank == 1:
            x[3, 3] = np.inf
        group.all_reduce(x, codec=codec, feedback=kept)
        assert np.isnan(x).all() and np.array_equal(kept.error, before)
        x = matrix(group.rank, 2, (10, 10))
        group.all_reduce(x, codec=codec, feedback=kept)
        assert np.isfinite(x).all()

    ranks.threads(2, work)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "vector": (np.zeros(4, "f4"), {}, "takes a matrix"),
    "empty": (np.zeros((0, 4), "f4"), {}, "takes a matrix"),
    "dtype": (np.zeros((4, 4)), {}, "low rank takes an array or a tensor of float32, got float64"),
    "op": (np.zeros((4, 4), "f4"), {"op": un.MAX}, "MAX has no meaning for low rank"),
    "algorithm": (np.zeros((4, 4), "f4"), {"algorithm": "ring"}, "algorithm= does not go with"),
    "feedback": (np.zeros((4, 4), "f4"), {"feedback": np.zeros((4, 4), "f4")}, "expected codec.feedback_for"),
    "async": (np.zeros((4, 4), "f4"), {"async_op": True}, "async_op=True does not go with"),
    "out": (np.zeros((4, 4), "f4"), {"out": np.zeros((4, 4), "f4")}, "out= does not go with"),
}


@each("name", list(WRONG))
def test_what_is_refused(name: str) -> None:
    x, options, text = WRONG[name]

    def work(group: un.Group) -> None:
        with pytest.raises((TypeError, ValueError), match=text):
            group.all_reduce(x.copy(), codec=un.LowRank(), **options)
        assert group.all_reduce(1) == 2

    ranks.threads(2, work)


def test_ranks_that_differ() -> None:
    def work(group: un.Group) -> None:
        x = np.ones((4, 4), np.float32)
        for codecs in ((un.LowRank(seed=0), un.LowRank(seed=1)), (un.LowRank(2), un.LowRank(3))):
            with pytest.raises(ValueError, match="the ranks differ in the codec"):
                group.all_reduce(x, codec=codecs[group.rank])
        codec = un.LowRank()
        kept = codec.feedback_for(x)
        group.all_reduce(x, codec=codec, feedback=kept)
        with pytest.raises(ValueError, match="in the calls that"):
            group.all_reduce(x, codec=codec, feedback=kept if group.rank else codec.feedback_for(x))
        with pytest.raises(ValueError, match="a codec of all_reduce alone"):
            group.broadcast(x, codec=codec)
        with pytest.raises(ValueError, match="for shape"):
            group.all_reduce(np.ones((2, 8), "f4"), codec=codec, feedback=kept)

    ranks.threads(2, work)


@each("arguments", [{"rank": 0}, {"rank": 1.5}, {"factors": "int8"}, {"seed": -1}, {"warm_start": 1}])
def test_wrong_codecs(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        un.LowRank(**arguments)
