"""Reductions by the program's own functions, against functools.reduce in the order of ranks, bit by bit."""

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache, partial, reduce
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import cases
from loops import each

NUMELS = (0, 1, 7, 2047, 2049, 20_000, 131_072)
"""Of float64: below and above the 16 KiB under which nothing is cut, and 1 MiB."""

MATRIX = np.dtype([("m", "f8", (2, 2))])
PAIR = np.dtype([("value", "f4"), ("index", "i4")])


def absmax(a: Any, b: Any) -> Any:
    return np.where(np.abs(a) >= np.abs(b), a, b)


def in_place(a: Any, b: Any) -> Any:
    a *= 0.5
    a += b
    return a


def last(a: Any, b: Any) -> Any:
    return b


def product(a: Any, b: Any) -> Any:
    out = np.empty_like(a)
    out["m"] = a["m"] @ b["m"]
    return out


FUNCTIONS: dict[str, tuple[un.Group | Any, str | np.dtype]] = {
    "a ufunc": (un.op(np.add), "f8"),
    "commutes": (un.op(absmax), "f4"),
    "in place": (un.op(in_place, commutative=False), "f8"),
    "the last": (un.op(last, commutative=False), "i2"),
    "matrices": (un.op(product, commutative=False), MATRIX),
    "half": (un.op(np.add, commutative=False), "f2"),
    "unsigned": (un.op(np.bitwise_or), "u8"),
}


def values(rank: int, numel: int, dtype: Any) -> np.ndarray:
    return _values(rank, str(np.dtype(dtype)))[:numel].copy()


@lru_cache(maxsize=128)
def _values(rank: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(rank)
    if dtype == str(MATRIX):
        return rng.uniform(-1, 1, NUMELS[-1]).view(MATRIX)
    drawn = rng.standard_normal(NUMELS[-1]) * 100
    # By a signed type: what a negative float is as an unsigned integer differs between processors.
    return (drawn if np.dtype(dtype).kind == "f" else drawn.astype("i8")).astype(dtype)


def folded(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    return reduce(lambda a, b: op.function(a.copy(), b), parts)


@pytest.mark.parametrize("size", cases([1, 2, 5, 8], long=[3, 4, 6, 7, 9]))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_host(name: str, size: int) -> None:
    op, dtype = FUNCTIONS[name]

    def work(group: un.Group) -> None:
        rank = group.rank
        for numel in NUMELS if size < 6 else NUMELS[1::2]:
            numel //= np.dtype(dtype).itemsize // 8 or 1
            parts = [values(each, numel, dtype) for each in range(size)]
            whole, x = folded(op, parts), parts[rank].copy()
            group.all_reduce(x, op)
            assert x.tobytes() == whole.tobytes(), numel
            x = parts[rank].copy()
            work = group.all_reduce(x, op, async_op=True)
            y = parts[rank].copy()
            other = group.reduce(y, size - 1, op, async_op=True)
            work.wait(), other.wait()
            assert x.tobytes() == whole.tobytes(), numel
            assert y.tobytes() == (whole if rank == size - 1 else parts[rank]).tobytes(), numel
            x, y = parts[rank].copy(), parts[rank].copy()
            group.scan(x, op)
            assert x.tobytes() == folded(op, parts[: rank + 1]).tobytes(), numel
            group.exclusive_scan(y, op)
            assert y.tobytes() == (folded(op, parts[:rank]) if rank else parts[0]).tobytes(), numel
            inputs = np.concatenate([np.roll(parts[rank], shift) for shift in range(size)])
            block = group.reduce_scatter(inputs.reshape(size, numel), op=op)
            assert block.tobytes() == np.roll(whole, rank).tobytes(), numel

    ranks.threads(size, work)


@pytest.mark.parametrize(("size", "per_host"), cases([(3, 1), (5, 2)], long=[(6, 3)]))
def test_between_hosts(size: int, per_host: int) -> None:
    def work(group: un.Group) -> None:
        for name, (op, dtype) in FUNCTIONS.items():
            for numel in (1, 5000, 100_000):
                numel //= np.dtype(dtype).itemsize // 8 or 1
                parts = [values(each, numel, dtype) for each in range(size)]
                x = parts[group.rank].copy()
                group.all_reduce(x, op)
                if name == "a ufunc":
                    assert np.allclose(x, folded(op, parts))
                    assert len(set(group.all_gather_object(x.tobytes()))) == 1
                else:
                    assert x.tobytes() == folded(op, parts).tobytes(), (name, numel)
                x = parts[group.rank].copy()
                group.scan(x, op, reproducible=True)
                assert x.tobytes() == folded(op, parts[: group.rank + 1]).tobytes(), (name, numel)

    ranks.threads(size, work, per_host=per_host)


def test_numbers_lists_and_algorithms() -> None:
    op = un.op(absmax)

    def work(group: un.Group) -> None:
        assert group.all_reduce(-group.rank, op) == -2
        out = np.empty(2)
        group.reduce_scatter(out, [np.array([float(group.rank), -r]) for r in range(3)], op)
        assert out.tolist() == [2.0, -group.rank]
        for algorithm in ("two_shot", "ring", "halving_doubling"):
            x = np.array([1.0, -group.rank])
            group.all_reduce(x, op, algorithm=algorithm)
            assert x.tolist() == [1.0, -2.0], algorithm
        with pytest.raises(ValueError, match="computes a result on several ranks.*two_shot"):
            group.all_reduce(np.zeros(3), op, algorithm="one_shot")
        ordered = un.op(last, commutative=False)
        with pytest.raises(ValueError, match="order of ranks.*functions that do not commute"):
            group.all_reduce(np.zeros(3), ordered, algorithm="ring")

    ranks.threads(3, work)


def test_pairs() -> None:
    def work(group: un.Group) -> None:
        mine = [(3, 1), (5, 1), (5, 0), (float("nan"), 2)][group.rank]
        x = np.array([mine, (-group.rank, group.rank)], PAIR)
        y = x.copy()
        group.all_reduce(x, un.MAXLOC)
        group.all_reduce(y, un.MINLOC)
        assert np.isnan(x[0]["value"]) and x[0]["index"] == 2 and tuple(x[1]) == (0.0, 0)
        assert y[0]["index"] == 2 and tuple(y[1]) == (-3.0, 3)
        assert group.all_reduce_object((5, 3 - group.rank), un.MAXLOC) == (5, 0)
        assert group.all_reduce_object((group.rank, 7), un.MINLOC) == (0, 7)

    ranks.threads(4, work)


# ---- objects -------------------------------------------------------------------------------------------


@each("size", [1, 2, 3, 4, 5, 9])
def test_objects(size: int) -> None:
    join = un.op(lambda a, b: a + b[::-1], commutative=False)

    def work(group: un.Group) -> None:
        parts = ["ab" * r + str(r) for r in range(size)]
        prefixes = list(accumulate(parts, lambda a, b: a + b[::-1]))
        mine = parts[group.rank]
        assert group.all_reduce_object(mine, join) == prefixes[-1]
        assert group.scan_object(mine, join) == prefixes[group.rank]
        found = group.reduce_object(mine, join, size - 1)
        assert found == (prefixes[-1] if group.rank == size - 1 else None)
        assert group.all_reduce_object(group.rank + 1, un.PRODUCT) == int(np.prod(np.arange(1, size + 1)))
        assert group.all_reduce_object([group.rank]) == list(range(size))
        assert group.all_reduce_object(parts[group.rank], un.MAX) == max(parts)
        assert group.all_reduce_object(-group.rank, un.MIN) == 1 - size
        big = group.all_reduce_object(np.full(40_000, group.rank), un.op(lambda a, b: np.concatenate([a, b])))
        assert big.tobytes() == np.repeat(np.arange(size), 40_000).tobytes()
        with pytest.raises(TypeError, match="all_reduce_object: op is .*AVG"):
            group.all_reduce_object(1, un.AVG)

    ranks.threads(size, work)


# ---- errors --------------------------------------------------------------------------------------------


def failing(a: Any, b: Any) -> Any:
    raise ZeroDivisionError("no such ratio")


CALLS: dict[str, Callable[[un.Group, Any], Any]] = {
    "all_reduce": lambda group, op: group.all_reduce(np.zeros(10), op),
    "async": lambda group, op: group.all_reduce(np.zeros(10), op, async_op=True).wait(),
    "between": lambda group, op: group.all_reduce(np.zeros(100_000), op),
    "scan_object": lambda group, op: group.scan_object(1, op),
    "all_reduce_object": lambda group, op: group.all_reduce_object(1, op),
}


@each("call", list(CALLS))
@each("per_host", [0, 2])
def test_an_exception_is_an_error_on_all_ranks(call: str, per_host: int) -> None:
    op, causes = un.op(failing), []

    def work(group: un.Group) -> None:
        with pytest.raises(
            un.Aborted, match="ZeroDivisionError: no such ratio, at test_functions.py:"
        ) as error:
            CALLS[call](group, op)
        assert " in failing" in str(error.value)
        causes.append(error.value.__cause__)

    ranks.threads(4, work, per_host=per_host, timeout_s=20)
    assert any(isinstance(cause, ZeroDivisionError) for cause in causes)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nothing": (lambda a, b: None, "returned None"),
    "shorter": (lambda a, b: a[:1], r"returned float64\[1\] for two arrays float64\[64\]"),
    "a number": (lambda a, b: a @ b, "returned .* expected such an array"),
    "wider": (lambda a, b: a + b * 1j, "returned complex128"),
    "writes b": (lambda a, b: b.__setitem__(0, 1), "read-only"),
    "mixes": (lambda a, b: a + np.cumsum(b), "does not combine element by element"),
    "mixes all": (lambda a, b: a * b.sum(), "all_reduce_object"),
}


@each("name", list(WRONG))
def test_wrong_functions(name: str) -> None:
    function, text = WRONG[name]
    op = un.op(function)

    def work(group: un.Group) -> None:
        with pytest.raises(un.Aborted, match="aborted the group because of") as error:
            group.all_reduce(np.ones(10_000), op)
        assert error.value.__cause__ is not None

    ranks.threads(2, work, timeout_s=20)
    with pytest.raises(type(op.raised), match=text):
        raise op.raised


def test_different_functions_are_a_mismatch() -> None:
    ops = [un.op(absmax), un.op(last, name="last one")]

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch, match="Their operations differ") as error:
            group.all_reduce(np.zeros(5), ops[group.rank])
        for text in ("op absmax", "test_functions.absmax, test_functions.py:", "op last one"):
            assert text in str(error.value)

    ranks.threads(2, work, timeout_s=20)


@each("pair", [(un.SUM, un.MAX), (un.op(absmax), un.op(last)), (un.op(absmax), un.SUM)])
def test_different_operations_of_objects_are_a_mismatch(pair: tuple[Any, Any]) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch):
            group.all_reduce_object(1, pair[group.rank])

    ranks.threads(2, work, timeout_s=20)


def test_a_function_may_not_call_its_group() -> None:
    def work(group: un.Group) -> None:
        op = un.op(lambda a, b: group.all_reduce(a))
        with pytest.raises(un.Aborted, match="from a reduction function") as error:
            group.all_reduce(np.zeros(5), op, async_op=bool(group.rank)).wait() if group.rank else (
                group.all_reduce(np.zeros(5), op)
            )
        assert group.rank or isinstance(error.value.__cause__, RuntimeError)

    ranks.threads(2, work, timeout_s=20)


def test_what_is_refused() -> None:
    op = un.op(absmax)

    def work(group: un.Group) -> None:
        for wrong in (3, None, op, int):
            with pytest.raises(TypeError, match="op: function is"):
                un.op(wrong)
        with pytest.raises(TypeError, match="op: commutative"):
            un.op(absmax, commutative=1)
        with pytest.raises(TypeError, match="absmax has no meaning for codes"):
            group.all_reduce(np.zeros(4, np.float32), op, codec="bf16")
        with pytest.raises(TypeError, match="one buffer a call"):
            group.all_reduce_coalesced([np.zeros(4)], op)
        with pytest.raises(TypeError, match="several dtypes"):
            group.reduce_scatter(np.zeros(4, "S8"), np.zeros((2, 4), PAIR), op)
        with pytest.raises(ValueError, match="longer than the longest message"):
            group.all_reduce(np.zeros(1, [("x", "f8", 1 << 20)]), op)
        assert group.all_reduce(group.rank + 1, op) == 2

    ranks.threads(2, work)


def test_a_function_is_not_kept() -> None:
    """Neither by the group nor by its cache: a closure may hold large things."""

    class Large:
        pass

    def work(group: un.Group) -> Any:
        large = Large()
        op = un.op(lambda a, b, kept=large: a + b)
        for _ in range(3):
            group.all_reduce(np.zeros(3), op)
        group.all_reduce(np.zeros(3), op, async_op=True).wait()
        group._forget(group.timeout_s)
        seen = weakref.ref(large)
        del large, op
        gc.collect()
        assert seen() is None

    ranks.threads(1, work)
    ranks.threads(2, work)


def test_threads_and_other_calls_meanwhile() -> None:
    """A function gives the interpreter to other threads, also those that call the group."""
    op = un.op(lambda a, b: (threading.Event().wait(0.001), a + b)[1])

    def work(group: un.Group) -> None:
        works = [group.all_reduce(np.full(3000, group.rank + 1.0), op, async_op=True) for _ in range(20)]
        sums = [np.full(10, 1.0) for _ in range(5)]
        for x in sums:
            group.all_reduce(x)
            assert (x == 3).all()
        un.wait_all(works)

    ranks.threads(3, work)


def test_partials_have_the_name_of_their_function() -> None:
    op = un.op(partial(absmax), name=None)
    assert "absmax" in op.description and op.number == un.op(partial(absmax)).number
    assert op.number != un.op(absmax, name="other").number != un.op(absmax, commutative=False).number
    assert op(3, -4) == -4
    assert pickle.loads(pickle.dumps(un.op(absmax, name="x"))).number == un.op(absmax, name="x").number
