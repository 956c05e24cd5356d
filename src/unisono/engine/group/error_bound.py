"""The error bound of a result, from the order in which a plan combines it and the bound of its codec.

The caller gives the largest magnitude of a contribution. An encoded value is at most as large as the exact
value plus the error so far; the codec's bound for it adds to the error. f32 rounds every sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from unisono.engine.operations.reduction import Op, PremulSum, ReduceOp
from unisono.plans.proof import CODES

__all__ = ["ErrorBound", "error_bound"]

ROUNDING = 2.0**-24
"""The rounding error of an f32 operation, relative to its result."""
LEAST = 2.0**-149
"""The smallest f32: the further error of a product or a quotient near zero."""
LARGEST = (2 - 2.0**-23) * 2.0**127


class ErrorBound(NamedTuple):
    """The largest magnitude of an exact value, and the largest error of the computed one."""

    magnitude: float
    error: float
    contributions: int = 1


def error_bound(
    order: object, largest: float, bound: Callable[[float], float], op: Op, size: int, kept: float = 0.0
) -> ErrorBound:
    """The loss of a result that is combined in this order, see `proof.Proof.results`.

    Args:
        largest: magnitude of any contribution.  bound: the codec's error bound for values up to a magnitude.
        size: the number of ranks.  kept: the largest magnitude in a feedback buffer.
    """
    assert isinstance(order, tuple)
    if isinstance(order[0], int):
        if isinstance(op, PremulSum):
            scaled = largest * abs(op.factor)
            return ErrorBound(scaled, scaled * ROUNDING + LEAST)
        return ErrorBound(largest, 0.0)
    if order[0] == CODES:
        given = error_bound(order[1], largest, bound, op, size, kept)
        held = given.magnitude + given.error + kept
        return given._replace(error=given.error + kept + kept * ROUNDING + bound(held * (1 + ROUNDING)))
    parts = [error_bound(part, largest, bound, op, size, kept) for part in order]
    return _combined(parts, op, size)


def _combined(parts: list[ErrorBound], op: Op, size: int) -> ErrorBound:
    contributions = sum(part.contributions for part in parts)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        magnitude = max(part.magnitude for part in parts)
        return ErrorBound(magnitude, max(part.error for part in parts), contributions)
    roundings = (len(parts) - 1) * ROUNDING * (1 + 2 * len(parts) * ROUNDING)
    if op is ReduceOp.PRODUCT:
        magnitude = math.prod(part.magnitude for part in parts)
        held = math.prod(part.magnitude + part.error for part in parts)
        most = math.prod(max(1.0, part.magnitude + part.error) for part in parts)  # includes partial products
        lost = held * roundings + len(parts) * LEAST * most if len(parts) > 1 else 0.0
        return ErrorBound(magnitude, held - magnitude + lost if most <= LARGEST else math.inf, contributions)
    magnitude = sum(part.magnitude for part in parts)
    error = sum(part.error for part in parts)
    error += roundings * (magnitude + error)
    found = _finite(ErrorBound(magnitude, error, contributions))
    if op is ReduceOp.AVG and contributions == size and len(parts) > 1:
        average = found.magnitude / size
        return ErrorBound(average, found.error / size + 2 * ROUNDING * average + LEAST, contributions)
    return found


def _finite(found: ErrorBound) -> ErrorBound:
    """Infinite where a value may exceed the largest f32."""
    fits = found.magnitude + found.error <= LARGEST
    return found if fits else found._replace(error=math.inf)
