"""The axes that cut a model, in a dry run: one rank's part of it runs, and no message is sent.

Tensor: the modules run on the first rank's parts. Context: the program of the last rank on its positions.
Experts: layers of stacked experts on one rank, which gets the rows of a full one. Values decide which rows go
where, and there are none. Rows are counted as if a router drew the experts of each row by chance: the mean,
and DEVIATIONS standard deviations more, as on a rank that is fuller than most. A run whose router prefers
some experts needs more on their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.parallel.context.exchange import ContextGroup
from unisono.parallel.context.program import ContextProgram
from unisono.parallel.context.runtime import ContextModel
from unisono.parallel.experts.exchange import RowExchange
from unisono.parallel.experts.layers import stacked_experts
from unisono.parallel.experts.stacked import numbers_of_experts
from unisono.parallel.generators import RngRegion
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.cut import Cut
from unisono.parallel.graph.fused import split_
from unisono.parallel.graph.written import Forward
from unisono.parallel.plan import Plan
from unisono.parallel.sharded_parameters import TYPES
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import run_cut

if TYPE_CHECKING:
    from unisono.parallel.mesh import PlanMesh

__all__ = ["DrawnRows", "DryContext", "run_parts", "spread_by_chance"]


class _TensorAlone(TensorAxis):
    """An axis whose other ranks are not there."""

    def sum_(self, value: Tensor) -> None:
        """Leave the values."""

    def gather_into(self, every: Tensor, mine: Tensor) -> None:
        """Leave the values."""

    def scatter_into(self, mine: Tensor, every: Tensor) -> None:
        """Leave the values."""


def run_parts(model: nn.Module, cut: Cut, device_type: str, *, regathers: bool) -> set[nn.Parameter]:
    """Have each module of a model without values run on the first rank's parts; return the parameters that
    are parts.
    """
    for path, sizes in cut.fused.items():
        split_(model, path, sizes)
    whole = set(model.parameters())

    def part(value: Tensor, dim: int) -> Tensor:
        return value.new_empty([n // cut.parts if at == dim else n for at, n in enumerate(value.shape)])

    run_cut(model, cut, part, _TensorAlone(None, 0, cut.parts, regathers), RngRegion(None, device_type))
    return set(model.parameters()) - whole


def _refuse(plan: Plan, axis: str, *, beside: Sequence[str]) -> None:
    """Raise UnfitError for an axis with another one with which its memory is not predicted."""
    for other in beside:
        if (size := getattr(plan, other)) > 1:
            raise UnfitError(f"{axis}={getattr(plan, axis)} with {other}={size}: its memory is not predicted")


# ---- context ---------------------------------------------------------------------------------------------


class DryContext(ContextModel):
    """A model without values whose sequence is cut, on the last rank: no other one has more in memory.

    Args:
        model: before it is wrapped.    output: what the loss gets of what it returns.
    Raises:
        ValueError: the plan has another axis, too, with which the memory is not predicted.
    """

    def __init__(self, model: nn.Module, output: Callable[[Any], Any], plan: Plan, device_type: str) -> None:
        _refuse(plan, "context", beside=("tensor", "pipeline"))
        dtype = TYPES[plan.precision] if plan.low else None
        axes = SimpleNamespace(device_type=device_type)
        mesh: Any = SimpleNamespace(plan=plan, axes=axes, context=None)
        super().__init__(model, dtype, output, mesh, None, None)

    def _group(self, mesh: PlanMesh) -> ContextGroup:
        return _ContextAlone(None, mesh.plan.context - 1, mesh.plan.context)

    def _proved(self, inputs: Any, targets: Any, loss: Any) -> ContextProgram:
        return self._program(inputs, targets, loss)

    def _shared_seed(self) -> int:
        return 0

    def _drawing(self, shared: int) -> AbstractContextManager[None]:
        del shared
        return nullcontext()


class _ContextAlone(ContextGroup):
    """A group whose other ranks are not there."""

    def sum_(self, value: Tensor) -> None:
        """Leave the values."""

    def gather(self, every: list[Tensor], mine: Tensor) -> None:
        """Leave the values."""

    def exchange(self, came: Tensor, sent: Tensor, gets: list[int], gives: list[int]) -> None:
        """Leave the values."""

    def hop(self, came: Tensor, sent: Tensor) -> list[Any]:
        """Everything has arrived."""
        del came, sent
        return []


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


def spread_by_chance(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Leave a rank its experts, in place; return their layers.

    Raises:
        ValueError: the model has no stacked experts, they do not divide, or the plan has another axis, too,
            with which the memory is not predicted.
    """
    if plan.expert == 1:
        return []
    _refuse(plan, "expert", beside=("tensor", "context"))
    layers = {module: count for module in model.modules() if (count := stacked_experts(module))}
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


class ExpertsByChance(Forward):
    """The forward of a layer on this rank's experts."""

    def __init__(self, module: nn.Module, experts: int, ranks: int) -> None:
        super().__init__(module)
        self._experts, self._ranks = experts, ranks

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        tensors = [*tensors_in((args, named))]
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
        args, named = mapped(given, lambda value: next(floating) if value.is_floating_point() else chosen)
        made: Tensor = self._run(*args, **named)
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
