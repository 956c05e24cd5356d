"""What is measured: one table of operations, the sizes, and what every rank must hold afterwards.

Pure NumPy, no process and no library under test: the expectation is computed from what each rank
is known to have put in. Bus-bandwidth factors are derived in docs/bench.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "REDUCE_OPS",
    "BenchCase",
    "BenchOperation",
    "CaseBuffers",
    "allocate",
    "count_wrong",
    "dtype_name",
    "expected",
    "fill",
    "numpy_dtype",
    "sweep",
]

Array = NDArray[Any]


@dataclass(frozen=True)
class BenchOperation:
    """One row of the table.

    Attributes:
        bus_factor: busbw = algbw * bus_factor(p).
        inp, out: numel of the two arrays, as shares of the case's count ("all", "part" = this rank's of
            `parts`, "parts" = p of those, "-" = none); out "-" means the result is in `inp`. `_root` means
            on the root only.
        reduces: takes a reduction operator.   rooted: takes a root.
        synchronizing: no rank can finish a call before every rank has started it.
        divided: the count must be a multiple of the number of ranks.
        uneven: rank r's part is r+1 times as large as rank 0's.
        hops: messages one after the other in a call; the time reported is that of one.
    """

    name: str
    bus_factor: Callable[[int], float]
    inp: str
    out: str
    reduces: bool = False
    rooted: bool = False
    synchronizing: bool = True
    hops: int = 1
    divided: bool = False
    uneven: bool = False

    @property
    def even(self) -> str:
        """The operation without "_v": what it is called where equal and unequal parts are one operation."""
        return self.name.removesuffix("_v")


def _one(_: int) -> float:
    return 1.0


def _fraction_of_others(p: int) -> float:
    return (p - 1) / p


def _both_ways(p: int) -> float:
    return 2 * (p - 1) / p


ROOTED: dict[str, bool] = {"rooted": True, "synchronizing": False}

OPERATIONS = {
    operation.name: operation
    for operation in (
        BenchOperation("all_reduce", _both_ways, "all", "-", reduces=True),
        BenchOperation("broadcast", _one, "all", "-", **ROOTED),
        BenchOperation("reduce", _one, "all", "-", reduces=True, **ROOTED),
        BenchOperation("all_gather", _fraction_of_others, "part", "all", divided=True),
        BenchOperation("reduce_scatter", _fraction_of_others, "all", "part", reduces=True, divided=True),
        BenchOperation("all_to_all", _fraction_of_others, "all", "all", divided=True),
        BenchOperation("gather", _fraction_of_others, "part", "all_root", divided=True, **ROOTED),
        BenchOperation("scatter", _fraction_of_others, "all_root", "part", divided=True, **ROOTED),
        BenchOperation("barrier", _one, "-", "-"),
        BenchOperation("send_recv", _one, "all", "all", hops=2),
        BenchOperation("scan", _one, "all", "-", reduces=True, synchronizing=False),
        BenchOperation("exclusive_scan", _one, "all", "-", reduces=True, synchronizing=False),
        BenchOperation("all_gather_v", _fraction_of_others, "part", "all", uneven=True),
        BenchOperation("all_to_all_v", _fraction_of_others, "all", "parts", uneven=True),
        BenchOperation("gather_v", _fraction_of_others, "part", "all_root", uneven=True, **ROOTED),
        BenchOperation("scatter_v", _fraction_of_others, "all_root", "part", uneven=True, **ROOTED),
    )
}

DTYPES = {
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}

# Beside NumPy's names: those of MPI and nccl-tests.
OTHER_SPELLINGS = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "int": "i32",
    "long": "i64",
    "byte": "u8",
}

# Distance from 1 to the next number.
EPSILON = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

# A prime, so that no segment or chunk boundary ever falls on a whole number of periods.
PATTERN_NUMEL = 8191


@dataclass(frozen=True)
class BenchCase:
    """One measured line: an operation at one size."""

    operation: str
    count: int
    dtype: str
    op: str
    root: int
    ranks: int
    algorithm: str = ""  # "": as Unisono chooses

    @property
    def nbytes(self) -> int:
        """The size by which the operation is listed."""
        return self.count * numpy_dtype(self.dtype).itemsize

    @property
    def parts(self) -> list[int]:
        """The elements of each rank's part; they add up to the count.

        Example: 12 over 3 ranks -> [4, 4, 4]; uneven [2, 4, 6].
        """
        if not OPERATIONS[self.operation].uneven:
            return [self.count // self.ranks] * self.ranks
        total = self.ranks * (self.ranks + 1) // 2
        bounds = [self.count * (rank * (rank + 1) // 2) // total for rank in range(self.ranks + 1)]
        return [high - low for low, high in pairwise(bounds)]

    def part_of(self, rank: int) -> slice:
        """Where a rank's part lies in the whole buffer."""
        first = sum(self.parts[:rank])
        return slice(first, first + self.parts[rank])

    def to_json(self) -> dict[str, Any]:
        """The case as the record names it."""
        return asdict(self)


@dataclass
class CaseBuffers:
    """The arrays of one rank; None where this rank or operation has none."""

    inp: Array | None
    out: Array | None

    @property
    def result(self) -> Array | None:
        """The buffer that holds what the operation gave."""
        return self.inp if self.out is None else self.out


def dtype_name(text: str) -> str:
    """The name in DTYPES for any usual spelling.

    Example: "float32", "FLOAT", "f32" -> "f32".
    Raises:
        ValueError: unknown.
    """
    lower = text.lower()
    spellings = {long: short for short, long in DTYPES.items()}
    name = spellings.get(lower) or OTHER_SPELLINGS.get(lower, lower)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}: choose from {', '.join(DTYPES)}")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype for one of DTYPES; bf16 comes from ml_dtypes.

    Raises:
        ValueError: unknown name, or bf16 without ml_dtypes.
    """
    name = dtype_name(name)
    if name != "bf16":
        return np.dtype(DTYPES[name])
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise ValueError("bf16 arrays need the package ml_dtypes: pip install ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def sweep(
    operation: BenchOperation, *, first: int, last: int, factor: float, dtype: str, **rest: Any
) -> Iterator[BenchCase]:
    """Yield the sweep `first, first * factor, ... <= last`, sizes rounded up to whole elements.

    Args:
        rest: of every case: op, root, ranks, algorithm.

    Example: first=4, last=64, factor=4, f32 -> counts 1, 4, 16; for all_gather over 3 ranks 3, 6, 18.
    """
    if operation.name == "barrier":
        yield BenchCase("barrier", 0, dtype, **rest)
        return
    itemsize = numpy_dtype(dtype).itemsize
    multiple = rest["ranks"] if operation.divided else 1
    seen = 0
    nbytes = float(first)
    while nbytes <= last:
        count = -(-max(1, round(nbytes) // itemsize) // multiple) * multiple
        if count > seen:
            yield BenchCase(operation.name, count, dtype, **rest)
            seen = count
        nbytes *= factor


def allocate(case: BenchCase, rank: int, empty: Callable[[int, Any], Array] = np.empty) -> CaseBuffers:
    """The arrays that `rank` needs, untouched, made by `empty` of a number of elements and a dtype."""
    operation = OPERATIONS[case.operation]
    part = case.parts[rank]
    numel = {"all": case.count, "part": part, "parts": part * case.ranks}

    def array(share: str) -> Array | None:
        base, _, where = share.partition("_")
        if base == "-" or (where == "root" and rank != case.root):
            return None
        return empty(numel[base], numpy_dtype(case.dtype))

    return CaseBuffers(array(operation.inp), array(operation.out))


def pattern(case: BenchCase, rank: int) -> Array:
    """What `rank` puts in, repeated over its input: small whole numbers, exact in every dtype."""
    low, high = (1, 3) if case.op == "product" else (0, 5)
    values = np.random.default_rng(rank + 1).integers(low, high, PATTERN_NUMEL)
    return values.astype(numpy_dtype(case.dtype))


def fill(case: BenchCase, rank: int, buffers: CaseBuffers) -> None:
    """Write the rank's input, and something that is no result into its output."""
    if buffers.inp is not None:
        buffers.inp[:] = np.resize(pattern(case, rank), buffers.inp.size)
    if buffers.out is not None:
        buffers.out.fill(77)


def count_wrong(case: BenchCase, rank: int, buffers: CaseBuffers) -> int:
    """How many values of the rank's result differ from what they must be."""
    want = expected(case, rank)
    if want is None or buffers.result is None:
        return 0
    if want.dtype.kind in "iu":
        return int(np.count_nonzero(buffers.result != want))
    got, want = buffers.result.astype(np.float64), want.astype(np.float64)
    tolerance = 4 * EPSILON[case.dtype] * np.abs(want)
    return int(np.count_nonzero(~((got == want) | (np.abs(got - want) <= tolerance))))


def expected(case: BenchCase, rank: int) -> Array | None:
    """The result that `rank` must hold; None where it holds none.

    Example (p=2, sum): rank 0 puts in [1, 2], rank 1 [3, 4] -> [4, 6] for both after all_reduce.
    """
    mine = case.part_of(rank)
    name = OPERATIONS[case.operation].even
    if name == "barrier" or (name == "gather" and rank != case.root):
        return None
    if name in ("scan", "exclusive_scan"):
        below = rank + (name == "scan")  # MPI leaves open what rank 0 gets of an exclusive one
        return _whole(case, _reduced(case, below)) if below else None
    if name == "all_reduce" or (name == "reduce" and rank == case.root):
        return _whole(case, _reduced(case))
    if name == "reduce":
        return _whole(case, pattern(case, rank))
    if name == "reduce_scatter":
        return _whole(case, _reduced(case))[mine]
    if name == "broadcast":
        return _whole(case, pattern(case, case.root))
    if name == "scatter":
        return _whole(case, pattern(case, case.root))[mine]
    if name == "send_recv":
        return _pingpong(case, rank)
    if name == "all_to_all":
        return np.concatenate([_whole(case, pattern(case, other))[mine] for other in range(case.ranks)])
    return np.concatenate([np.resize(pattern(case, other), part) for other, part in enumerate(case.parts)])


def _whole(case: BenchCase, one_period: Array) -> Array:
    return np.resize(one_period, case.count)


def _pingpong(case: BenchCase, rank: int) -> Array | None:
    """Ranks 2k and 2k+1 are a pair, and what goes to and fro is the even one's; an odd last rank idles."""
    even = rank - rank % 2
    return None if even + 1 >= case.ranks else _whole(case, pattern(case, even))


def _reduced(case: BenchCase, below: int | None = None) -> Array:
    """One period of the reduction over all ranks, or those below a number, wrapping as the dtype does."""
    ufuncs: dict[str, Callable[[Array, Array], Array]] = {
        "sum": np.add,
        "avg": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    patterns = [pattern(case, rank) for rank in range(case.ranks if below is None else below)]
    exact = patterns if patterns[0].dtype.kind in "iu" else [one.astype(np.float64) for one in patterns]
    total = reduce(ufuncs[case.op], exact)
    if case.op == "avg":
        total = total / case.ranks
    return total.astype(patterns[0].dtype)
