"""Ranks that have the same rows: each sends its share of them to experts, and they add up what returns.

    7 rows on 2 such ranks: 0 1 2 | 3 4 5 6

Ranks of one tensor group have the same values and the same gradients. Ranks of one context group that compute
a whole sequence have the same values, and their gradients add up (context/exchange.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from unisono.parallel.context.exchange import total
from unisono.parallel.generators import drawing, seed_of
from unisono.parallel.tensor_moves import move

if TYPE_CHECKING:
    from unisono.parallel.context.exchange import ContextGroup
    from unisono.parallel.tensor_moves import TensorAxis


class RowShares:
    """The ranks that have this rank's rows.

    Args:
        tensor: those of its tensor group.
        context: those of its context group; None: they have other rows.
        label: of what they exchange, in a trace.
    Attributes:
        parts: how many they are.
    """

    def __init__(self, tensor: TensorAxis, context: ContextGroup | None, label: str) -> None:
        self._tensor, self._context, self._label = tensor, context, label
        ranks, place = (1, 0) if context is None else (context.ranks, context.rank)
        self.parts, self._place = tensor.parts * ranks, place * tensor.parts + tensor.place

    def bounds(self, rows: int) -> tuple[int, int]:
        """The rows [first, last) that this rank sends."""
        return rows * self._place // self.parts, rows * (self._place + 1) // self.parts

    def entered(self, value: Tensor) -> Tensor:
        """A value of which each rank uses its share."""
        return value if self._tensor.parts == 1 else move(value, "enter", 0, self._tensor, self._label)

    def added(self, value: Tensor) -> Tensor:
        """The sum of what the ranks have."""
        if self._tensor.parts > 1:
            value = move(value, "sum", 0, self._tensor, self._label)
        return value if self._context is None else total(value, self._context, self._label)

    def joined(self, share: Tensor, rows: int) -> Tensor:
        """All rows of which each rank has its share. Shapes: share [own rows, width]."""
        if self.parts == 1:
            return share
        first, last = self.bounds(rows)
        return self.added(functional.pad(share, (0, 0, first, rows - last)))

    def drawing(self, device: str) -> AbstractContextManager[None]:
        """These ranks draw for other rows, and the same numbers afterwards."""
        if self.parts == 1:
            return nullcontext()
        shared = int(torch.randint(2**62, (), device="cpu"))
        return drawing(seed_of(shared, self._place), device)
