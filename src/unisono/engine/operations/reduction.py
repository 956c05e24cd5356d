"""The reduction operations. Their numbers are the engine's (`_native.reduce_ops()`; a test compares them)."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from unisono.engine.operations.functions import UserOp


class ReduceOp(IntEnum):
    """How contributions are combined.

    AVG is the sum divided by the number of ranks (floating point and complex only). On bool, SUM is
    "any" and PRODUCT "all". MIN and MAX propagate NaN. BAND, BOR and BXOR take integers and bool.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7

    __hash__ = int.__hash__  # Enum's own is Python code: a tenth of the time of a small call


class PremulSum(msgspec.Struct, frozen=True):
    """Sum after multiplying every contribution of this rank by `factor` (ranks may differ in it)."""

    factor: float
    value: int = 8
    name: str = "PREMUL_SUM"


BuiltinOp = ReduceOp | PremulSum
Op = BuiltinOp | UserOp


def premul_sum(factor: float) -> PremulSum:
    """The operation that sums factor * contribution.

    Example (p=2): premul_sum(0.5) on [2.0] and [4.0] -> [3.0] on both.
    """
    try:
        return PremulSum(float(factor))
    except OverflowError:  # of an int
        raise ValueError(f"premul_sum: factor is {factor}, more than a float holds") from None
