"""Means over ranks in steps: a generator starts a message, yields its work, and continues when it is done.

All ranks advance their generators in the same order, so their calls match. Messages of other generators are
under way meanwhile. The last value of each generator has the same bits on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from unisono.codecs import Codec
from unisono.codecs import low_rank as arithmetic
from unisono.codecs.formats import FLOATS
from unisono.torch_internals import version_names

from .compression_state import CompressionState

Result = TypeVar("Result")
Steps = Generator[list[Any], None, Result]


def exact_mean(flat: Tensor, group: dist.ProcessGroup) -> Steps[None]:
    """Replace `flat` by its mean over the ranks."""
    yield [dist.all_reduce(flat, group=group, async_op=True)]
    flat.div_(group.size())


def coded_mean(
    flat: Tensor, codec: Codec, group: dist.ProcessGroup, *, feedback: bool
) -> Steps[tuple[Tensor, Tensor | None]]:
    """Average f32 vectors that are sent as codes.

    Unisono's engine does it in one call, between hosts only where there are several. Over another backend
    every rank adds up one part, in f32, and encodes its mean: two messages, 2(p-1)/p of the codes' bytes sent
    per rank.

    Shapes: flat [p k], k values to a part, each a whole number of the codec's blocks (see `length`).
    Args:
        feedback: also return the rounding errors.
    Returns:
        The mean as all ranks decode it. With feedback, the error that is still to be sent: `flat` minus the
        values of this rank's codes, and p times the rounding error of the mean in this rank's own part. The
        mean of the errors over the ranks is the error of the result. Where that is not finite, the error is
        undefined.
    """
    engine = getattr(group, "all_reduce_coded", None)
    if engine is None:
        result, left = yield from _coded_by_parts(flat, codec, group, feedback=feedback)
        return result, left
    result, left = flat.clone(), torch.zeros_like(flat) if feedback else None
    yield [engine(result, codec, left)]
    return result.div_(group.size()), left


def _coded_by_parts(
    flat: Tensor, codec: Codec, group: dist.ProcessGroup, *, feedback: bool
) -> Steps[tuple[Tensor, Tensor | None]]:
    """`coded_mean` over any backend."""
    size, part = group.size(), flat.numel() // group.size()
    codes = codec.encode(flat).view(torch.uint8)
    received = torch.empty_like(codes)
    yield [dist.all_to_all_single(received, codes, group=group, async_op=True)]
    mean = torch.zeros(part)
    for theirs in received.chunk(size):
        codec.accumulate(theirs, mean)
    mean.div_(size)
    own = codec.encode(mean).view(torch.uint8)
    yield [version_names.all_gather_single(received, own, group=group, async_op=True)]
    result = codec.decode(received, out=torch.empty_like(flat))
    if not feedback:
        return result, None
    left = codec.decode(codes, out=torch.empty_like(flat))
    torch.sub(flat, left, out=left)
    mine = slice(part * group.rank(), part * (group.rank() + 1))
    left[mine].add_(mean - result[mine], alpha=size)
    return result, left


def length(numel: int, codec: Codec, size: int) -> int:
    """The length of a vector of which `size` ranks get equal parts of whole blocks."""
    step = size * (codec.block or 1)
    return math.ceil(numel / step) * step


def finite(values: Tensor) -> bool:
    """Whether all values are finite."""
    if values.numel() == 0:
        return True
    return all(math.isfinite(end) for end in torch.stack(torch.aminmax(values)).tolist())


def concurrently(*parts: Steps[None]) -> Steps[None]:
    """Advance several generators at once: their messages are under way together."""
    live = list(parts)
    while live:
        works: list[Any] = []
        for part in list(live):
            try:
                works += next(part)
            except StopIteration:
                live.remove(part)
        if works:
            yield works


# ---- PowerSGD: the factors of all matrices of a bucket, sent in one vector for each round ----


_LARGEST = torch.finfo(torch.float32).max


class GradientMatrix(NamedTuple):
    """A matrix in a bucket: its state, and its values [n, m], which become the result."""

    held: CompressionState
    values: Tensor


class _TorchArrays:
    """See `arithmetic.Arrays`."""

    zeros_like = staticmethod(torch.zeros_like)
    finite = staticmethod(finite)
    where: Any = staticmethod(torch.where)
    given = staticmethod(torch.from_numpy)

    def qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        found, triangle = torch.linalg.qr(columns.double())
        return found, triangle

    def rows(self, columns: Tensor) -> Tensor:
        # row by row: what is saved and loaded must be multiplied in the same way
        return columns.t().float().contiguous()

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)


ARRAYS = _TorchArrays()


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


# ---- generators that run ----


@dataclass
class _Exchange:
    label: str
    steps: Steps[None]
    works: list[Any]


class ExchangeQueue:
    """Generators that are not done, oldest first."""

    def __init__(self) -> None:
        self._live: list[_Exchange] = []

    def begin(self, label: str, steps: Steps[None]) -> None:
        """Start `steps`; then advance the earlier generators by one step."""
        older, begun = list(self._live), _Exchange(label, steps, [])
        self._live.append(begun)
        self._go_on(begun)
        for each in older:
            self._go_on(each)

    def finish(self) -> None:
        """Advance until all are done."""
        while self._live:
            for each in list(self._live):
                self._go_on(each)

    def drop(self) -> None:
        """Drop all generators once nothing is in flight: their buffers may be used again."""
        older, self._live = self._live, []
        for each in older:
            each.steps.close()
            for work in each.works:
                work.wait()

    def _go_on(self, begun: _Exchange) -> None:
        for work in begun.works:
            work.wait()
        begun.works = []
        with record_function(begun.label), torch.no_grad():
            works = next(begun.steps, None)
        if works is None:
            self._live.remove(begun)
        else:
            begun.works = works
