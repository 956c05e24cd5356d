"""The expert axis in a dry run: layers of stacked experts on one rank, which gets the rows of a full one.

Values decide which rows go where, and there are none. Rows are counted as if a router drew the experts of
each row by chance: the mean, and DEVIATIONS standard deviations more, as on a rank that is fuller than most.
A run whose router prefers some experts needs more on their ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.parallel.experts.exchange import RowExchange
from unisono.parallel.experts.stacked import numbers_of_experts
from unisono.parallel.graph.written import Forward
from unisono.parallel.plan import Plan

__all__ = ["DrawnRows", "spread_by_chance"]

DEVIATIONS = 2.0


class DrawnRows(NamedTuple):
    """Rows of a layer on one rank, where a router draws `top` of the experts for each row.

    Args:
        sent: from this rank, a row once to each rank that has some of its experts; on average.
        received: from all ranks, on a full rank.
        pairs: of a row and one of its experts, on a full rank.
    """

    sent: int
    received: int
    pairs: int

    @staticmethod
    def of(rows: int, experts: int, top: int, ranks: int) -> DrawnRows:
        """Draw without replacement: a row has no expert twice.

        Example: 1000 rows on each of 2 ranks, 2 of 4 experts -> 1667 sent, 1700 received, 2052 pairs.
        """
        here, every = experts // ranks, rows * ranks
        top = min(top, experts)
        reaches = 1 - math.comb(experts - here, top) / math.comb(experts, top)
        mean = top / ranks  # experts of a row that are here: a hypergeometric number
        variance = mean * (1 - 1 / ranks) * (experts - top) / max(1, experts - 1)
        return DrawnRows(
            round(every * reaches),
            _full(every, reaches, reaches * (1 - reaches), 1),
            _full(every, mean, variance, min(top, here)),
        )


def _full(rows: int, mean: float, variance: float, most: int) -> int:
    """The sum over independent rows, on a full rank. `most`: of a row."""
    return min(rows * most, round(rows * mean + DEVIATIONS * math.sqrt(rows * variance)))


def spread_by_chance(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Leave a rank its experts, in place; return their layers.

    Raises:
        ValueError: the model has no stacked experts, they do not divide, or the plan has another axis, too,
            with which the memory is not predicted.
    """
    if plan.expert == 1:
        return []
    for axis in ("tensor", "context"):
        if getattr(plan, axis) > 1:
            raise UnfitError(
                f"expert={plan.expert} with {axis}={getattr(plan, axis)}: its memory is not predicted"
            )
    layers = {module: count for module in model.modules() if (count := _stacked(module))}
    if not layers:
        raise UnfitError(
            f"expert={plan.expert}: {type(model).__name__} has no layers of stacked experts, and the memory "
            "of lists of experts is not predicted"
        )
    for module, count in layers.items():
        if count % plan.expert:
            raise UnfitError(f"expert={plan.expert} does not divide the {count} experts of a layer")
        for name, value in [*module.named_parameters(recurse=False)]:
            mine = value.data[: count // plan.expert].clone()
            module.register_parameter(name, nn.Parameter(mine, requires_grad=value.requires_grad))
        for name in numbers_of_experts(module, count):
            setattr(module, name, count // plan.expert)
        ExpertsByChance(module, count, plan.expert)
    return [*layers]


def _stacked(module: nn.Module) -> int:
    """How many experts a layer has; 0: it is none."""
    own = [*module.parameters(recurse=False)]
    if not own or own[0].dim() < 2 or len(own) != len([*module.parameters()]):
        return 0
    count = own[0].shape[0]
    alike = count > 1 and all(value.shape[0] == count for value in own)
    routed = len(inspect.signature(module.forward).parameters) == 3  # rows, experts, weights
    return count if alike and routed and numbers_of_experts(module, count) else 0


class ExpertsByChance(Forward):
    """The forward of a layer on this rank's experts."""

    def __init__(self, module: nn.Module, experts: int, ranks: int) -> None:
        super().__init__(module)
        self._experts, self._ranks = experts, ranks

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        rows, weight = (each for each in tensors if each.is_floating_point())
        (index,) = (each for each in tensors if not each.is_floating_point())
        given, ranks = rows, self._ranks
        rows, index = rows.flatten(0, -2), index.long()
        count, top = index.shape
        owner = torch.where(index < 0, ranks, index.div(ranks, rounding_mode="floor"))
        goes = torch.zeros(count, ranks + 1, dtype=torch.bool, device=rows.device)
        goes = goes.scatter_(1, owner, value=True)[:, :ranks]
        drawn = DrawnRows.of(count, self._experts, top, ranks)
        rank, row = index.new_empty(drawn.sent, 2).unbind(1)
        del goes
        there = owner[row] == rank.unsqueeze(1)
        local = torch.where(there, index[row] - rank.unsqueeze(1), -1)
        exchange = _RowsAlone([drawn.sent], [drawn.received], None, "")
        x, i, w = exchange.there(rows[row], local, weight[row])
        back = exchange.back(self._here(x, i, w, (args, named), drawn.pairs))
        return back.new_zeros(rows.shape).index_add(0, row, back).view(given.shape)

    def _here(self, rows: Tensor, index: Tensor, weight: Tensor, given: Any, pairs: int) -> Tensor:
        """The sum over this rank's experts for each row that came: `pairs` of a row and an expert."""
        row, slot = index.new_empty(pairs, 2).unbind(1)
        floating = iter((rows[row], weight[row, slot].unsqueeze(1)))
        chosen = index[row, slot].unsqueeze(1)
        args, named = given

        def paired(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return next(floating) if value.is_floating_point() else chosen

        called = [paired(value) for value in args], {name: paired(value) for name, value in named.items()}
        made: Tensor = self._run(*called[0], **called[1])
        return made.new_zeros(rows.shape).index_add(0, row, made)


class _RowsAlone(RowExchange):
    """An exchange that sends nothing."""

    def back(self, rows: Tensor) -> Tensor:
        """As many rows as were sent."""
        (own,) = _RowsAlone(self.receives, self.sends, None, "").there(rows)
        return own

    def move(self, rows: Tensor, *, forward: bool) -> Tensor:
        """Leave the values."""
        receives: Sequence[int] = self.receives if forward else self.sends
        made, _sent = rows.new_empty(sum(receives), *rows.shape[1:]), rows.contiguous()
        return made
