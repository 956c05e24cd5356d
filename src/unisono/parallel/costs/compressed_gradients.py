"""What compressed gradients take: the bytes of codes and factors, and the work to make them.

The steps at the beginning that send gradients exactly (`start=`) do not count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from unisono.codecs.codec import Codec
from unisono.errors import UnfitError
from unisono.parallel.replicated_parameters import BUCKET_BYTES

from .operator_kinds import OperatorPoint
from .trace import NO_UNIT, TracedOperator, TracedStep

if TYPE_CHECKING:
    from unisono.parallel.compression.settings import CompressionSettings

    from .collectives import Collectives
    from .operator_prices import OperatorPrices

__all__ = ["CompressedGradients", "exchange_s", "of_stages", "sent_gradients"]

EXACT_BYTES = 16
"""Moved for an element that is sent as it is: into one vector and back."""

CODED_BYTES = 52
"""Moved for an element that is coded: into a vector, the error added, a copy, result and error back."""

RANKED_BYTES = 36
"""Moved for an element of a matrix of low rank, beside its three products: the error added and kept."""

PASSES = 4
"""Over an element of a factor: to make it orthonormal in f64, and to send it."""


class CompressedGradients(NamedTuple):
    """What a rank sends of the gradients of a stage.

    Attributes:
        exact: elements in f32.    coded: codec -> elements.
        matrices: rows, columns and rank of those of low rank.    factors: their codec; None: f32.
    """

    exact: int
    coded: Mapping[Codec, int]
    matrices: Sequence[tuple[int, int, int]]
    factors: Codec | None

    @property
    def buckets(self) -> int:
        """Of gradients in f32."""
        whole = self.exact + sum(self.coded.values()) + sum(n * m for n, m, _ in self.matrices)
        return max(1, -(-4 * whole // BUCKET_BYTES))


def sent_gradients(
    settings: CompressionSettings, shapes: Iterable[tuple[str, Sequence[int]]]
) -> CompressedGradients:
    """What these settings make of parameters.

    Args:
        shapes: name and shape of each, as a rank has it.
    Raises:
        ValueError, TypeError: a rule of the settings has no such choice.
    Example: PowerSGD(rank=4) sends 4 * (1024 + 4096) elements of a matrix of 1024 x 4096.
    """
    exact, coded, matrices = 0, defaultdict[Codec, int](int), list[tuple[int, int, int]]()
    for name, shape in shapes:
        numel = math.prod(shape)
        choice = settings.choice(name, shape)
        if isinstance(choice, Codec):
            coded[choice] += numel
        elif isinstance(choice, int) and numel:
            matrices.append((shape[0], numel // shape[0], choice))
        else:
            exact += numel
    return CompressedGradients(exact, coded, matrices, settings.low_rank.codec)


def of_stages(
    settings: CompressionSettings, traced: TracedStep, stages: Sequence[int], count: int
) -> dict[int, CompressedGradients]:
    """What a rank of each stage sends.

    Args:
        stages: that of each module call.    count: how many there are.
    Raises:
        ValueError: the gradients are not in f32, in the memory of a host.
    """
    shapes: dict[int, list[tuple[str, Sequence[int]]]] = {stage: [] for stage in range(count)}
    for name, value in traced.model.named_parameters():
        if not value.requires_grad:
            continue
        if value.dtype != torch.float32 or value.device.type not in ("cpu", "meta"):
            raise UnfitError(
                f"compression takes f32 gradients in CPU memory, and {name!r} is {value.dtype} on "
                f"{value.device}"
            )
        call = traced.homes.get(name, (-1, NO_UNIT))[0]
        shapes[stages[call] if call >= 0 else 0].append((name, tuple(value.shape)))
    return {stage: sent_gradients(settings, each) for stage, each in shapes.items()}


def exchange_s(
    sent: CompressedGradients, members: Sequence[int], collectives: Collectives, prices: OperatorPrices
) -> tuple[float, float]:
    """Seconds to average them over these ranks: coding, communication."""
    number = sent.buckets

    def over(elements: int, codec: Codec | None) -> float:
        nbytes = 4 * elements / number
        if not elements:
            return 0.0
        if codec is None:
            return number * collectives.seconds("all_reduce", members, nbytes)
        return number * collectives.coded(members, nbytes, codec)

    communication = over(sent.exact, None)
    communication += sum(over(elements, codec) for codec, elements in sent.coded.items())
    left, right = (sum(each[side] * each[2] for each in sent.matrices) for side in (0, 1))
    communication += over(left, sent.factors) + over(right, sent.factors)
    coding = prices.light(EXACT_BYTES * sent.exact) if sent.exact else 0.0
    for elements in sent.coded.values():
        coding += prices.light(CODED_BYTES * elements)
    for rows, columns, rank in sent.matrices:
        coding += 3 * prices.seconds(_product_of(rows, columns, rank))
        coding += prices.light(RANKED_BYTES * rows * columns + 8 * PASSES * rank * (rows + columns))
    return coding, communication


def _product_of(rows: int, columns: int, rank: int) -> TracedOperator:
    size = OperatorPoint("product", (float(rows), float(columns), float(rank)))
    return TracedOperator(size, "update", -1, NO_UNIT, followed=False)
