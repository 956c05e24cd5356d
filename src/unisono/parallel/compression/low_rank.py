"""PowerSGD of gradients: the factors of all matrices of a bucket, sent in one vector for each round.

`unisono.codecs.low_rank` has the arithmetic; here are PyTorch's arrays and the messages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.codecs import Codec
from unisono.codecs import low_rank as arithmetic
from unisono.codecs.formats import FLOATS

from .compression_state import CompressionState
from .exchange_queue import Steps, coded_mean, exact_mean, finite, length

_LARGEST = torch.finfo(torch.float32).max


class GradientMatrix(NamedTuple):
    """A matrix in a bucket: its state, and its values [n, m], which become the result."""

    held: CompressionState
    values: Tensor


class _TorchArrays:
    """See `arithmetic.Arrays`."""

    zeros_like = staticmethod(torch.zeros_like)
    finite = staticmethod(finite)

    def qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        found, triangle = torch.linalg.qr(columns.double())
        return found, triangle

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    def rows(self, columns: Tensor) -> Tensor:
        # row by row: what is saved and loaded must be multiplied in the same way
        return columns.t().float().contiguous()

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)

    def given(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
        return torch.from_numpy(values)


ARRAYS = _TorchArrays()
orthonormal = functools.partial(arithmetic.orthonormal, ARRAYS)
random_factor = functools.partial(arithmetic.random_factor, ARRAYS)


def low_rank(
    matrices: list[GradientMatrix],
    codec: Codec | None,
    group: dist.ProcessGroup,
    *,
    seed: int,
    step: int,
    warm: bool,
) -> Steps[None]:
    """Replace each matrix by the approximation of its mean, see `arithmetic.rounds`."""
    largest = _LARGEST if codec is None else min(_LARGEST, FLOATS[codec.name].largest)
    rounds = arithmetic.rounds(matrices, ARRAYS, seed=seed, step=step, warm=warm, largest=largest)
    factors = next(rounds)
    while factors:
        means = yield from _averaged(factors, codec, group)
        try:
            factors = rounds.send(means)
        except StopIteration:
            return


def _averaged(factors: list[Tensor], codec: Codec | None, group: dist.ProcessGroup) -> Steps[list[Tensor]]:
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
