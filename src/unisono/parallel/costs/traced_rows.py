"""Traces of one program for any number of rows: two are recorded, the others follow in proportion.

Sizes of operators are a + b * rows in nearly every model. A third recording tells whether they are in this
one; if not, each number of rows is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from unisono.parallel.graph.shapes import CaptureError

from .traced_step import TracedAttention, TracedMove, TracedOperator, TracedStep

__all__ = ["TracedRows"]

CLOSE = 0.01
"""Sizes that differ by no more than this share are the same."""

LEAST = 2
"""Rows of a recording that others follow: one row may have other strides."""


class TracedRows:
    """What has been recorded of one model, under any number of cuts."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, TracedStep]] = {}
        self._bases: dict[Hashable, list[int]] = {}
        self._proportional: bool | None = None  # not known yet
        self._errors: dict[Hashable, CaptureError] = {}

    def of(self, key: Hashable, rows: int, record: Callable[[int], TracedStep]) -> TracedStep:
        """The step of so many rows.

        Args:
            key: of the program.  record: makes the trace of so many rows.
        Raises:
            CaptureError: it cannot be recorded. Other rows than one are not tried again then.
        """
        failed = key, rows >= LEAST
        if failed in self._errors:
            raise self._errors[failed]
        known, bases = self._known.setdefault(key, {}), self._bases.setdefault(key, [])
        if rows in known:
            return known[rows]
        guess = None
        if len(bases) == 2 and self._proportional is not False:
            guess = followed((bases[0], known[bases[0]]), (bases[1], known[bases[1]]), rows)
        if guess is not None and self._proportional:
            known[rows] = guess
            return guess
        try:
            known[rows] = record(rows)
        except CaptureError as error:
            self._errors[failed] = error
            raise
        if rows >= LEAST and len(bases) == 2 and self._proportional is None:
            self._proportional = guess is not None and _same(guess, known[rows])
        if rows >= LEAST and len(bases) < 2:
            bases.append(rows)
        return known[rows]


def followed(one: tuple[int, TracedStep], other: tuple[int, TracedStep], rows: int) -> TracedStep | None:
    """The trace of other rows, from those of two; None: these have other operators.

    Example: a product of (16, 8, 8) for 2 rows and (32, 8, 8) for 4 is (8, 8, 8) for one.
    """
    (first, low), (second, high) = one, other
    if not _alike(low, high):
        return None

    def size(a: float, b: float) -> float:
        return a if a == b else max(1.0, a + (b - a) * (rows - first) / (second - first))

    def operator(a: TracedOperator, b: TracedOperator) -> TracedOperator:
        if a.size.point == b.size.point:
            return a
        point = tuple(size(x, y) for x, y in zip(a.size.point, b.size.point, strict=True))
        return a._replace(size=a.size._replace(point=point))

    def moved(a: Any, b: Any) -> Any:
        return a._replace(nbytes=round(size(a.nbytes, b.nbytes)))

    def attention(a: TracedAttention, b: TracedAttention) -> TracedAttention:
        return a._replace(queries=round(size(a.queries, b.queries)), keys=round(size(a.keys, b.keys)))

    return replace(
        low,
        operators=[operator(*pair) for pair in zip(low.operators, high.operators, strict=True)],
        moves=[moved(*pair) for pair in zip(low.moves, high.moves, strict=True)],
        attentions=[attention(*pair) for pair in zip(low.attentions, high.attentions, strict=True)],
        calls=[moved(*pair) for pair in zip(low.calls, high.calls, strict=True)],
    )


def _alike(one: TracedStep, other: TracedStep) -> bool:
    """Whether two traces are of one program."""

    def program(step: TracedStep) -> Any:
        operators = [each._replace(size=each.size._replace(point=())) for each in step.operators]
        moves: list[TracedMove] = [each._replace(nbytes=0) for each in step.moves]
        attentions = [each._replace(queries=0, keys=0) for each in step.attentions]
        return operators, moves, attentions, [each._replace(nbytes=0) for each in step.calls]

    return bool(program(one) == program(other))


def _same(guess: TracedStep, recorded: TracedStep) -> bool:
    """Whether the sizes of a guess are those that were recorded."""
    if not _alike(guess, recorded):
        return False
    sizes = [
        pair
        for a, b in zip(guess.operators, recorded.operators, strict=True)
        for pair in zip(a.size.point, b.size.point, strict=True)
    ]
    return all(abs(a - b) <= CLOSE * max(a, b) for a, b in sizes)
