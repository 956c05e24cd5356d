"""Tries in the first step whether a loss is the mean of its parts, into which a plan cuts the rows.

The loss of some rows is compared with those of their parts, in several splits: one may hide the difference.
It counts only where the order of the rows does not matter: then rows of the output belong to rows of the
targets, and the loss draws no numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import rows_of
from .generators import drawing
from .graph.containers import mapped, tensors_in
from .loss_weights import count_of, kept_of, mean, pair

__all__ = ["LossCheck"]

ROWS = 8  # that are tried
SEED = 0x5EED
FAR = 1e-4, 2e-2  # of the loss: what differs by more is another number, in f32 and in 16 bits


class LossCheck:
    """A loss of (output, targets) that remembers some rows.

    Args:
        weigh: by what its means are weighed: a function, "counted", or None.    ignored: a label.
        device: where it is computed.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], weigh: Any, ignored: int, device: str) -> None:
        self.loss, self._weigh, self._ignored, self._device = loss, weigh, ignored, device
        self.seen: list[tuple[Any, Any]] = []
        self.asked = False  # a step has called it, on all ranks

    def __call__(self, output: Any, targets: Any) -> Any:
        with contextlib.suppress(Exception):  # the loss itself says what is wrong with them
            if self.rows < ROWS:
                self.seen.append(mapped(_some((output, targets)), lambda t: t.detach().clone()))
        return self.loss(output, targets)

    @property
    def rows(self) -> int:
        """How many it has seen."""
        return sum(rows_of([targets]) for _, targets in self.seen)

    def tensors(self) -> list[list[Tensor]]:
        """What it has seen, for other ranks."""
        return [[t.cpu() for t in tensors_in(one)] for one in self.seen]

    def problem(self, others: Sequence[list[Tensor]] = ()) -> str:
        """Why it is no mean over the rows that it has seen; "": it is, or this cannot be tried.

        Args:
            others: `tensors` of all ranks, in place of this one's.
        """
        if not self.seen:
            return ""
        found = ""
        with torch.no_grad(), drawing(SEED, self._device), _untouched(self.loss):
            for split in (_thirds, _pairs, _singles):
                with contextlib.suppress(Exception):  # it takes no other number of rows, or hides them
                    found = found or self._problem(self._joined(others), split)
        return found

    def _joined(self, others: Sequence[list[Tensor]]) -> tuple[Any, Any]:
        seen = others or [[*tensors_in(one)] for one in self.seen]
        columns = iter([torch.cat(some) for some in zip(*seen, strict=True)])
        return mapped(self.seen[0], lambda own: next(columns).to(own.device))  # type: ignore[no-any-return]

    def _problem(self, whole: tuple[Any, Any], split: Callable[[int], list[range]]) -> str:
        rows = rows_of([whole[1]])
        if rows < 2:
            return ""
        parts = [_taken(whole, some) for some in split(rows)]
        value, values = self._value(whole), [self._value(part) for part in parts]
        low = min(t.itemsize for t in [value, *values]) < 4
        found, several = value.item(), [each.item() for each in values]
        limit = FAR[low] * max(map(abs, [found, *several])) + 1e-9
        expected = self._expected(whole, parts, several)
        if any(not abs(found - each) > limit for each in expected):  # nor where one is NaN
            return ""
        turned, again = self._value(_taken(whole, range(rows)[::-1])).item(), self._value(whole).item()
        if not (abs(found - turned) <= limit and abs(found - again) <= 1e-3 * limit):
            return ""
        return (
            f"the loss of {rows} rows is {found:.6g}, and of {len(parts)} parts of them "
            f"{', '.join(f'{each:.6g}' for each in several)}, which make {expected[0]:.6g}"
        )

    def _value(self, part: tuple[Any, Any]) -> Tensor:
        value: Any = self.loss(*part)
        return pair(value)[0] if self._weigh == "counted" else mean(value)

    def _expected(self, whole: Any, parts: Sequence[Any], values: Sequence[float]) -> list[float]:
        """What the loss should be, by each way in which it may be meant."""
        if self._weigh == "counted":
            counts = [pair(self.loss(*part))[1] for part in (whole, *parts)]
            return [sum(values) if abs(counts[0] - sum(counts[1:])) < 0.5 else float("inf")]
        count = count_of(self._weigh) if callable(self._weigh) else rows_of
        ways = [[count(part[1] if callable(self._weigh) else list(part[1:])) for part in parts]]
        if self._weigh is None:
            ways.append(
                [kept_of(part[1], self._ignored) * rows for part, rows in zip(parts, ways[0], strict=True)]
            )
        return [
            sum(n * each for n, each in zip(ns, values, strict=True) if n) / sum(ns) if sum(ns) else values[0]
            for ns in ways
        ]


def not_a_mean(problem: str) -> str:
    """The text of the error, on all ranks."""
    return (
        f"the loss is no mean of its parts, into which the plan cuts the rows: "
        f"{problem or 'another rank found it'}. "
        "Write parallelize(..., weigh=targets -> the number by which it divides), such as weigh=lambda "
        "targets: "
        'class_weights[targets].sum(); or weigh="counted", with a loss that returns (sum, count); or give '
        'nn.CrossEntropyLoss(...) itself. weigh="rows" takes the mean of the parts, as DDP does'
    )


def _thirds(rows: int) -> list[range]:
    first = (rows + 1) // 3 or 1
    return [range(first), range(first, rows)]


def _pairs(rows: int) -> list[range]:
    return [range(n, min(n + 2, rows)) for n in range(0, rows, 2)]


def _singles(rows: int) -> list[range]:
    return [range(n, n + 1) for n in range(rows)]


def _some(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """A few rows, from all over the batch."""
    rows = rows_of([batch[1]])
    return batch if rows <= ROWS else _taken(batch, [rows * n // ROWS for n in range(ROWS)])


def _taken(batch: tuple[Any, Any], chosen: Sequence[int]) -> tuple[Any, Any]:
    """Some rows of output and targets. An output may have several values for a row, one after the other."""
    rows, index = rows_of([batch[1]]), torch.tensor([*chosen], dtype=torch.long)

    def take(value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value
        each, rest = divmod(len(value), rows)
        if rest or not each:
            raise ValueError("no rows")
        cut: Tensor = value.unflatten(0, (rows, each))  # type: ignore[no-untyped-call]
        return cut[index.to(value.device)].flatten(0, 1)

    return mapped(batch, take)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _untouched(loss: Any) -> Iterator[None]:
    """What the loss changes meanwhile is as before afterwards: attributes, buffers, Python's generators."""
    held = [*loss.modules()] if isinstance(loss, nn.Module) else [loss] if hasattr(loss, "__dict__") else []
    kept = [(vars(one), dict(vars(one))) for one in held]
    buffers = [
        (b, b.clone()) for one in held if isinstance(one, nn.Module) for b in one.buffers(recurse=False)
    ]
    numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        for now, before in kept:
            now.clear()
            now.update(before)
        for buffer, values in buffers:
            buffer.copy_(values)
