"""PowerSGD: matrices as P Q^T, in two rounds of means for all matrices of a call.

    x = values + error             P = x Q, averaged       P made orthonormal
    Q = x^T P, averaged            result = P Q^T          error = x - result         Q made orthonormal

Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2.

Orthonormal columns come from Householder's QR in f64 (LAPACK). Its columns are orthonormal to rounding
whatever the matrix is; those of Gram-Schmidt, which the paper and PyTorch's hook use, lose it with the
condition of the matrix, and a factor that came as bf16 has columns that are nearly dependent where one
singular value dominates. A column of zeros needs no epsilon: Householder gives some orthonormal one.

Q is made orthonormal, too. In exact numbers this changes nothing, P spans the same; but x Q with the old Q,
whose columns have the lengths of singular values, has squares of those, and 16 bits lose the small ones.

Both are held as P^T [r, n] and Q^T [r, m], each row in one piece: products with a large matrix are twice to
fourteen times as fast so. The arithmetic is written once, for NumPy's arrays and for PyTorch's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.codecs.formats import FLOATS
from unisono.engine.base.validation import flag, whole

_LARGEST = 3.4028234663852886e38  # of f32
_DEFICIENT = 1e-6  # of the largest: a column with less beside the others is noise of f32
_BLOCK = 1 << 18  # values that are worked on at a time: 1 MiB
_MOST_RANK = 1 << 20
_FACTORS = ("bf16", "fp16", "1-6-9")
Array = Any


class Arrays(Protocol):
    """What NumPy and PyTorch call differently."""

    def qr(self, columns: Array) -> tuple[Array, Array]:
        """The reduced QR in f64."""

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """Elements of x where the condition holds, else of y."""

    def rows(self, columns: Array) -> Array:
        """The transpose in f32, each row in one piece."""

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """out = a b."""

    def finite(self, values: Array) -> bool:
        """Whether all are finite."""

    def zeros_like(self, values: Array) -> Array:
        """Zeros of that shape."""

    def given(self, values: Array) -> Array:
        """An array of NumPy as one of this library."""


class Held(Protocol):
    """What a rank keeps of one matrix. factor: Q^T [rank, m], orthonormal; None: not begun."""

    name: str
    factor: Array

    @property
    def rank(self) -> int:
        """Of the factors."""

    def add_error(self, values: Array) -> None:
        """Add what was not sent."""

    def room(self, values: Array) -> Array:
        """Memory for a new error, as `values`; None: nothing is kept."""

    def keep(self, left: Array, step: int) -> None:
        """Store it."""

    def limit(self, most: float) -> None:
        """Cut errors to magnitudes of at most that."""


def rounds(
    matrices: Sequence[tuple[Held, Array]],
    arrays: Arrays,
    *,
    seed: int,
    step: int,
    warm: bool,
    largest: float = _LARGEST,
) -> Generator[list[Array], list[Array], None]:
    """Replace each matrix [n, m] by the approximation of its mean; keep what that lacks of this rank's own.

    It yields the factors of all matrices, twice, and is sent their means over the ranks. Where a matrix of
    any rank is not finite, all ranks get NaN for it, and its error and Q stay as they were. The same where a
    factor overflows its format; errors are then cut so far that they alone do not make the next one overflow.

    Args:
        warm: begin with the Q of the last call.  largest: of the format in which factors are sent.
    """
    for held, values in matrices:
        if held.factor is None or not warm:
            held.factor = random_factor(arrays, held.name, values.shape[1], held.rank, seed, step)
        held.add_error(values)
    firsts = yield [held.factor @ values.T for held, values in matrices]
    good = [arrays.finite(first) for first in firsts]
    bases = [
        orthonormal(arrays, p if ok else arrays.zeros_like(p)) for p, ok in zip(firsts, good, strict=True)
    ]
    seconds = yield [basis @ values for (_, values), basis in zip(matrices, bases, strict=True)]
    for (held, values), basis, second, ok in zip(matrices, bases, seconds, good, strict=True):
        # no entry of the product is larger than this
        bound = float(abs(second).max()) * held.rank if second.shape[1] else 0.0
        if not ok or not bound < _LARGEST:
            values[...] = math.nan
            held.limit(largest / (4 * math.sqrt(max(values.shape))))
            continue
        _replace(arrays, values, basis, second, held, step)
        if warm and bool(second.any()):  # zeros say nothing of where to look
            held.factor = orthonormal(arrays, second, _spare(arrays, held, second.shape[1], seed, step))


def _spare(arrays: Arrays, held: Held, length: int, seed: int, step: int) -> Callable[[], Array]:
    return lambda: random_factor(arrays, held.name, length, held.rank, seed, step)


def _replace(arrays: Arrays, values: Array, basis: Array, second: Array, held: Held, step: int) -> None:
    """Put P Q^T in the place of `values`, and keep the difference; some rows at a time, in the cache."""
    left, columns = held.room(values), basis.T
    rows = max(1, _BLOCK // values.shape[1])
    for start in range(0, values.shape[0], rows):
        at = slice(start, start + rows)
        if left is not None:
            left[at] = values[at]
        arrays.multiply(columns[at], second, values[at])
        if left is not None:
            left[at] -= values[at]
    if left is not None:
        held.keep(left, step)


def orthonormal(arrays: Arrays, rows: Array, spare: Callable[[], Array] | None = None) -> Array:
    """Orthonormal rows that span those given. Shapes: [r, n] -> the same, r <= n.

    Args:
        spare: makes the [r, n] that takes the place of rows that depend on those before them.
    """
    found, triangle = arrays.qr(rows.T)
    if spare is not None:
        lengths = abs(triangle.diagonal())
        dependent = lengths <= _DEFICIENT * lengths.max()
        if bool(dependent.any()):
            found, _ = arrays.qr(arrays.where(dependent, spare().T, found))
    return arrays.rows(found)


def random_factor(arrays: Arrays, name: str, length: int, rank: int, seed: int, step: int) -> Array:
    """The Q^T [rank, length] with which all ranks begin: of the seed, the parameter and the step."""
    import numpy as np

    mixed = zlib.crc32(f"{seed} {step} {name}".encode())
    drawn = np.random.Generator(np.random.PCG64(mixed)).standard_normal((rank, length), np.float32)
    return orthonormal(arrays, arrays.given(drawn))


# ---- a call of a group ---------------------------------------------------------------------------------


class NumPyArrays:
    """See `Arrays`."""

    def qr(self, columns: Array) -> tuple[Array, Array]:
        """See `Arrays`."""
        import numpy as np

        return np.linalg.qr(columns.astype(np.float64))

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """See `Arrays`."""
        import numpy as np

        return np.where(condition, x, y)

    def rows(self, columns: Array) -> Array:
        """See `Arrays`."""
        import numpy as np

        return np.ascontiguousarray(columns.T, np.float32)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """See `Arrays`."""
        import numpy as np

        np.matmul(a, b, out=out)

    def finite(self, values: Array) -> bool:
        """See `Arrays`."""
        import numpy as np

        return bool(np.isfinite(values).all())

    def zeros_like(self, values: Array) -> Array:
        """See `Arrays`."""
        return 0 * values.astype(bool).astype(values.dtype)

    def given(self, values: Array) -> Array:
        """See `Arrays`."""
        return values


@dataclass(frozen=True)
class LowRank:
    """The codec of a call that sends a matrix as two factors.

    Without feedback the part of the sum that has no place in `rank` directions is dropped, and the first
    directions are random: expect a large error. With it, the error is added in the next call, which begins
    with the directions of this one. `un.parallel.PowerSGD` does this for all gradients of a model.

    Cost: r (n + m) values in place of n m; three small collectives in place of one.

    Args:
        rank: r, of the factors; at most min(n, m) is used.
        factors: the format in which they are sent: "f32", "bf16", "fp16" or "1-6-9".
        warm_start: False: every call begins with random directions.  seed: of the first ones.
    Raises:
        TypeError, ValueError: wrong arguments.
    Example: codec = un.LowRank(rank=4); kept = codec.feedback_for(x)
        group.all_reduce(x, un.AVG, codec=codec, feedback=kept)  # [1024, 4096]: 80 KiB in place of 16 MiB
    """

    rank: int = 4
    factors: str = "f32"
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole(self.rank, "rank", 1, _MOST_RANK))
        object.__setattr__(self, "seed", whole(self.seed, "seed", 0, 2**63 - 1))
        flag(self.warm_start, "warm_start")
        if self.factors not in ("f32", *_FACTORS):
            raise ValueError(f"factors is {self.factors!r}, expected 'f32', {', '.join(map(repr, _FACTORS))}")

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of both factors of a matrix; further axes count as columns."""
        n, m = shape[0], math.prod(shape[1:])
        return (4 if self.factors == "f32" else 2) * min(self.rank, n, m) * (n + m)

    @property
    def largest(self) -> float:
        """The largest value of a factor."""
        return _LARGEST if self.factors == "f32" else min(_LARGEST, FLOATS[self.factors].largest)

    def feedback_for(self, x: Array) -> LowRankFeedback:
        """An empty error of a matrix like `x`, for `feedback=`. One object for each matrix, on every rank."""
        return LowRankFeedback(tuple(x.shape))


class LowRankFeedback:
    """What this rank has not sent of a matrix, and where the next call begins.

    Attributes:
        shape: of the matrix.  error: f32 [n, m]; None: nothing yet.  factor: Q^T [r, m]; None: not begun.
        calls: made with it.
    """

    name = "matrix"

    def __init__(self, shape: tuple[int, ...], keeps: bool = True) -> None:
        if len(shape) < 2 or not math.prod(shape):
            raise ValueError(f"low rank takes a matrix, got shape {list(shape)}")
        self.shape, self._keeps = shape, keeps
        self.error: Array = None
        self.factor: Array = None
        self.calls = 0
        self.rank = 0

    def begin(self, codec: LowRank) -> None:
        """A call with this codec begins."""
        rank = min(codec.rank, self.shape[0], math.prod(self.shape[1:]))
        if self.factor is not None and rank != self.rank:
            self.factor = None
        self.rank = rank

    def add_error(self, values: Array) -> None:
        """See `Held`."""
        if self.error is not None:
            values += self.error

    def room(self, values: Array) -> Array:
        """See `Held`."""
        if self._keeps and self.error is None:
            self.error = values * 0
        return self.error

    def keep(self, left: Array, step: int) -> None:
        """See `Held`: `room` was the error itself."""

    def limit(self, most: float) -> None:
        """See `Held`."""
        if self.error is not None:
            import numpy as np

            np.clip(np.nan_to_num(self.error), -most, most, out=self.error)
