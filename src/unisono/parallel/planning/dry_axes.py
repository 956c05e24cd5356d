"""Experts in a dry run: layers of stacked experts on one rank, which gets the rows of a full one.

Values decide which rows go where, and there are none. Rows are counted as if a router drew the experts of
each row by chance: the mean, and DEVIATIONS standard deviations more, as on a rank that is fuller than most.
A run whose router prefers some experts needs more on their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.errors import UnfitError
from unisono.parallel.experts.axis import ExpertAxis
from unisono.parallel.experts.exchange import RowExchange
from unisono.parallel.experts.layers import expert_layers, stacked_experts
from unisono.parallel.experts.stacked import StackedExperts, cut_stacked
from unisono.parallel.plan import Plan
from unisono.torch_internals.training import module_at

if TYPE_CHECKING:
    from unisono.parallel.mesh import PlanMesh

__all__ = ["DrawnRows", "refuse_axes", "spread_by_chance"]


def refuse_axes(plan: Plan, axis: str, *, beside: Sequence[str]) -> None:
    """Raise UnfitError for an axis with another one with which its memory is not predicted."""
    for other in beside:
        if (size := getattr(plan, other)) > 1:
            raise UnfitError(f"{axis}={getattr(plan, axis)} with {other}={size}: its memory is not predicted")


# ---- experts ---------------------------------------------------------------------------------------------

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


def spread_by_chance(model: nn.Module, mesh: PlanMesh) -> ExpertAxis | None:
    """Leave a rank its experts, in place; None: the plan has no such axis.

    Raises:
        ValueError: the model has no stacked experts, they do not divide, or the plan has another axis, too,
            with which the memory is not predicted.
    """
    plan = mesh.plan
    if plan.expert == 1:
        return None
    refuse_axes(plan, "expert", beside=("tensor", "context"))
    if not any(map(stacked_experts, model.modules())):
        raise UnfitError(
            f"expert={plan.expert}: {type(model).__name__} has no layers of stacked experts, and the memory "
            "of lists of experts is not predicted"
        )
    layers = [layer for layer in expert_layers(model, None, plan) if layer.kind == "stacked"]
    axis = ExpertAxis(model, layers, mesh, recorded=False)
    for layer in layers:
        module = module_at(model, layer.path)
        cut_stacked(layer.path, module, axis.mesh.part("tensor"), axis.tensor, ExpertsByChance)
    return axis


class ExpertsByChance(StackedExperts):
    """The forward of a layer on this rank's experts."""

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        given = self._bound(args, named)
        if not any(isinstance(value, DTensor) for value in self._module.parameters()):
            return self._recorded(given)  # of a copy of the whole model
        rows, index, ranks = given.rows.flatten(0, -2), given.chosen, self._ranks
        count, top = index.shape
        owner = torch.where(index < 0, ranks, index.div(ranks, rounding_mode="floor"))
        goes = torch.zeros(count, ranks + 1, dtype=torch.bool, device=rows.device)
        goes = goes.scatter_(1, owner, value=True)[:, :ranks]
        drawn = DrawnRows.of(count, self._experts, top, ranks)
        rank, row = index.new_empty(drawn.sent, 2).unbind(1)
        del goes
        there = owner[row] == rank.unsqueeze(1)
        local = torch.where(there, index[row] - rank.unsqueeze(1), -1)
        exchange = RowExchange([drawn.sent], [drawn.received], self._group, self._label)
        x, i, w = exchange.there(rows[row], local, given.weight[row])
        back = exchange.back(self._fullest(x, i, w, given.names, drawn.pairs))
        return back.new_zeros(rows.shape).index_add(0, row, back).view(given.rows.shape)

    def _fullest(self, rows: Tensor, index: Tensor, weight: Tensor, names: Any, pairs: int) -> Tensor:
        """The sum over this rank's experts for each row that came: `pairs` of a row and an expert."""
        row, slot = index.new_empty(pairs, 2).unbind(1)
        given = rows[row], index[row, slot].unsqueeze(1), weight[row, slot].unsqueeze(1)
        with self._parts():
            made: Tensor = self._called(dict(zip(names, given, strict=True)))
        return made.new_zeros(rows.shape).index_add(0, row, made)
