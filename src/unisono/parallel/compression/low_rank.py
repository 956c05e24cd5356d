"""PowerSGD: the gradients of matrices as P Q^T, in two messages for all matrices of a bucket.

    x = gradient + error           P = x Q, averaged       P made orthonormal
    Q = x^T P, averaged            result = P Q^T          error = x - result         Q made orthonormal

Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2.

Orthonormal columns come from Householder's QR in f64 (LAPACK). Its columns are orthonormal to rounding
whatever the matrix is; those of Gram-Schmidt, which the paper and PyTorch's hook use, lose it with the
condition of the matrix, and a factor that came as bf16 has columns that are nearly dependent where one
singular value dominates. A column of zeros needs no epsilon: Householder gives some orthonormal one.

Q is made orthonormal, too. In exact numbers this changes nothing, P spans the same; but x Q with the old Q,
whose columns have the lengths of singular values, has squares of those, and 16 bits lose the small ones.

Both are held as P^T [r, n] and Q^T [r, m], each row in one piece: products with a large matrix are twice to
fourteen times as fast so.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unisono.codecs.formats import FLOATS

from .exchange_queue import Steps, coded_mean, exact_mean, finite, length

if TYPE_CHECKING:
    import torch.distributed as dist

    from unisono.codecs import Codec

    from .compression_state import CompressionState

__all__ = ["GradientMatrix", "low_rank", "orthonormal", "random_factor"]

_LARGEST = torch.finfo(torch.float32).max
_DEFICIENT = 1e-6  # of the largest: a column with less beside the others is noise of f32
_BLOCK = 1 << 18  # values that are worked on at a time: 1 MiB


class GradientMatrix(NamedTuple):
    """A matrix in a bucket: its state, and its values [n, m], which become the result."""

    held: CompressionState
    values: Tensor


def low_rank(
    matrices: list[GradientMatrix],
    codec: Codec | None,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
    warm: bool,
) -> Steps[None]:
    """Replace each matrix by the approximation of its mean; keep what that lacks of this rank's own.

    Where a gradient of any rank is not finite, all ranks get NaN for this matrix, and its error buffer and Q
    stay as they were. The same where a factor overflows its format; errors are then cut so far
    that they alone do not make the next one overflow, too.
    """
    for held, values in matrices:
        if held.factor is None or not warm:
            held.factor = random_factor(held.name, values.shape[1], held.rank, seed, step)
        held.add_error(values)
    firsts = [held.factor @ values.t() for held, values in matrices if held.factor is not None]
    firsts = yield from _averaged(firsts, codec, group)
    good = [finite(first) for first in firsts]
    bases = [orthonormal(p) if ok else torch.zeros_like(p) for p, ok in zip(firsts, good, strict=True)]
    seconds = [basis @ values for (_, values), basis in zip(matrices, bases, strict=True)]
    seconds = yield from _averaged(seconds, codec, group)
    largest = _LARGEST if codec is None else min(_LARGEST, FLOATS[codec.name].largest)
    for (held, values), basis, second, ok in zip(matrices, bases, seconds, good, strict=True):
        # no entry of the product is larger than this
        bound = float(second.abs().max()) * held.rank if second.numel() else 0.0
        if not ok or not bound < _LARGEST:
            values.fill_(math.nan)
            held.limit(largest / (4 * math.sqrt(max(values.shape))))
            continue
        _replace(values, basis, second, held, step)
        if warm and bool(second.any()):  # zeros say nothing of where to look
            shape = held.name, second.shape[1], held.rank
            held.factor = orthonormal(second, functools.partial(random_factor, *shape, seed, step))


def _replace(values: Tensor, basis: Tensor, second: Tensor, held: CompressionState, step: int) -> None:
    """Put P Q^T in the place of `values`, and keep the difference; some rows at a time, in the cache."""
    left, columns = held.room(values), basis.t()
    rows = max(1, _BLOCK // values.shape[1])
    for start in range(0, values.shape[0], rows):
        at = slice(start, start + rows)
        if left is not None:
            left[at].copy_(values[at])
        torch.mm(columns[at], second, out=values[at])
        if left is not None:
            left[at].sub_(values[at])
    if left is not None:
        held.keep(left, step)


def orthonormal(rows: Tensor, spare: Callable[[], Tensor] | None = None) -> Tensor:
    """Orthonormal rows that span those given. Shapes: [r, n] -> the same, r <= n.

    Args:
        spare: makes the [r, n] that takes the place of rows that depend on those before them.
    """
    found, triangle = torch.linalg.qr(rows.t().double())
    if spare is not None:
        lengths = triangle.diagonal().abs()
        dependent = lengths <= _DEFICIENT * lengths.max()
        if bool(dependent.any()):
            found, _ = torch.linalg.qr(torch.where(dependent, spare().t().double(), found))
    # row by row: what is saved and loaded must be multiplied in the same way
    result: Tensor = found.t().to(rows.dtype).contiguous()
    return result


def random_factor(name: str, length: int, rank: int, seed: int, step: int) -> Tensor:
    """The Q^T [rank, length] with which all ranks begin: of the seed, the parameter and the step."""
    mixed = zlib.crc32(f"{seed} {step} {name}".encode())
    generator = torch.Generator().manual_seed(mixed)
    return orthonormal(torch.randn(rank, length, generator=generator))


def _averaged(factors: list[Tensor], codec: Codec | None, group: dist.ProcessGroup) -> Steps[list[Tensor]]:
    """The means of all factors, in one vector."""
    sizes = [factor.numel() for factor in factors]
    flat = torch.cat([factor.reshape(-1) for factor in factors])
    if codec is None:
        yield from exact_mean(flat, group)
    else:
        padded = flat.new_zeros(length(flat.numel(), codec, group.size()))
        padded[: flat.numel()] = flat
        flat, _ = yield from coded_mean(padded, codec, group, feedback=False)
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(factor.shape) for part, factor in zip(parts, factors, strict=True)]
