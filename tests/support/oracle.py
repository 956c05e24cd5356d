"""The expected result of a collective, computed with NumPy from the input of every rank."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from functools import reduce as fold

import ml_dtypes
import numpy as np

import unisono as un
from unisono.engine.memory.buffers import REDUCIBLE

NUMPY_DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in REDUCIBLE}
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")

FOLDS: dict[un.ReduceOp, Callable] = {
    un.SUM: np.add,
    un.AVG: np.add,
    un.PRODUCT: np.multiply,
    un.MIN: np.minimum,
    un.MAX: np.maximum,
    un.BAND: np.bitwise_and,
    un.BOR: np.bitwise_or,
    un.BXOR: np.bitwise_xor,
}


def pairs() -> list[tuple[str, un.ReduceOp]]:
    """Every valid (dtype, op)."""
    arithmetic = [un.SUM, un.PRODUCT]
    order = [un.MIN, un.MAX]
    bits = [un.BAND, un.BOR, un.BXOR]
    found = [(dtype, op) for dtype in ("bool", *INTEGERS) for op in arithmetic + order + bits]
    found += [(dtype, op) for dtype in FLOATS for op in [*arithmetic, *order, un.AVG]]
    return found + [(dtype, op) for dtype in COMPLEX for op in [*arithmetic, un.AVG]]


def data(rank: int, numel: int, dtype: str, op: un.ReduceOp | None = None, seed: int = 0) -> np.ndarray:
    """The input of rank `rank`: the same everywhere for the same arguments. Read-only."""
    return _data(rank, numel, dtype, op is un.PRODUCT, seed)


@lru_cache(maxsize=256)
def _data(rank: int, numel: int, dtype: str, small: bool, seed: int) -> np.ndarray:
    made = _make(rank, numel, dtype, small, seed)
    made.flags.writeable = False
    return made


def _make(rank: int, numel: int, dtype: str, small: bool, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank, numel])
    if dtype == "bool":
        return rng.integers(0, 2, numel).astype(bool)
    if dtype in INTEGERS:
        low, high = (1, 4) if small else (0, 100)
        return rng.integers(low, high, numel).astype(dtype)
    if dtype in COMPLEX:
        return (rng.standard_normal(numel) + 1j * rng.standard_normal(numel)).astype(dtype)
    return rng.uniform(0.5, 1.5, numel).astype(NUMPY_DTYPES[dtype])


@lru_cache(maxsize=64)
def total(group_size: int, numel: int, dtype: str, op: un.ReduceOp, seed: int = 0) -> np.ndarray:
    """The reduction over the first `group_size` ranks' `data`."""
    return reduced([data(rank, numel, dtype, op, seed) for rank in range(group_size)], op)


def reduced(parts: list[np.ndarray], op: un.ReduceOp, factors: Sequence[float] | None = None) -> np.ndarray:
    """The reduction in the order of ranks; 16-bit floats are widened, and rounded once.

    `factors`: each part is multiplied by its factor first.
    """
    dtype = parts[0].dtype
    wide = [
        part.astype(np.float32) if dtype.itemsize == 2 and dtype.name in FLOATS else part for part in parts
    ]
    if factors is not None:
        wide = [part * part.dtype.type(factor) for part, factor in zip(wide, factors, strict=True)]
    with np.errstate(over="ignore"):
        result = fold(FOLDS[op], wide)
        if op is un.AVG:
            result = result / wide[0].dtype.type(len(parts))
        return result.astype(dtype)


def tolerance(dtype: str, size: int, rounds_often: bool = False) -> dict[str, float]:
    """The allowed error of an algorithm that combines in another order, or rounds at every hop."""
    eps = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1.2e-7, "float64": 2.3e-16}
    base = eps.get(dtype, eps["float32"] if dtype == "complex64" else eps["float64"])
    return (
        {"rtol": base * size * 4, "atol": base * size * 4}
        if rounds_often
        else {"rtol": base * 4, "atol": base * 4}
    )


def check(found: np.ndarray, expected: np.ndarray, exact: bool, dtype: str, size: int, what: object) -> None:
    """Compare bit for bit, or within rounding."""
    assert found.dtype == expected.dtype, what
    # NumPy multiplies and divides complex numbers differently on different processors.
    if (exact and dtype not in COMPLEX) or dtype in INTEGERS or dtype == "bool":
        if found.tobytes() != expected.tobytes():
            wrong = np.flatnonzero(found != expected)[:5]
            raise AssertionError(f"{what}: wrong at {wrong}: {found[wrong]} instead of {expected[wrong]}")
        return
    wide = np.complex128 if dtype in COMPLEX else np.float64
    np.testing.assert_allclose(
        found.astype(wide),
        expected.astype(wide),
        err_msg=str(what),
        **tolerance(dtype, size, rounds_often=True),
    )
