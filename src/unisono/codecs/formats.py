"""The properties of a format: its last place, its largest number, the bound of its error."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["FLOATS", "FloatFormat", "block_bound"]


class FloatFormat(NamedTuple):
    """A floating-point format. docs/codecs.md has the table.

    Attributes:
        fraction: bits of the fraction.  bias: of the exponent.
        largest: the largest finite number.  signed: whether there are numbers below zero.
    """

    fraction: int
    bias: int
    largest: float
    signed: bool = True

    @property
    def unit(self) -> float:
        """The smallest positive number; subnormal numbers are its multiples."""
        return math.ldexp(1.0, 1 - self.bias - self.fraction)

    def place(self, magnitude: float) -> float:
        """The distance of neighbours in the binade of `magnitude`."""
        if magnitude == 0:
            return self.unit
        return max(self.unit, math.ldexp(1.0, math.frexp(magnitude)[1] - 1 - self.fraction))

    def bound(self, largest: float, stochastic: bool) -> float:
        """The largest error of any value of at most that magnitude; infinite where it may overflow."""
        if stochastic:
            return self.place(largest) if largest <= self.largest else math.inf
        half = self.place(largest) / 2
        return half if largest < self.largest + self.place(self.largest) / 2 else math.inf


FLOATS: dict[str, FloatFormat] = {
    "bf16": FloatFormat(7, 127, math.ldexp(255, 120)),
    "fp16": FloatFormat(10, 15, 65504.0),
    "fp8_e4m3": FloatFormat(3, 7, 448.0),
    "fp8_e5m2": FloatFormat(2, 15, 57344.0),
    "1-6-9": FloatFormat(9, 31, math.ldexp(1023, 22)),
    "0-6-10": FloatFormat(10, 51, 4094.0, signed=False),
}

LEAST_SCALE = math.ldexp(1.0, -126)


def block_bound(largest: float, most: int, stochastic: bool) -> float:
    """The largest error in a block of at most that magnitude, with codes of -most..most.

    A half, or a whole, of the scale; the rest is what the f32 scale, its reciprocal and two products round.
    """
    scale = max(largest / most, LEAST_SCALE)
    return scale * ((1.0 if stochastic else 0.5) + 2.0**-15)
