"""Which parameters several stages, or ranks of a tensor group, hold: their gradients add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .gradients import TiedParameter
from .graph.cut import Cut
from .mesh import PlanMesh, group_of

__all__ = ["sums_of", "ties_of"]


def sums_of(cut: Cut, names: dict[str, str], mesh: PlanMesh) -> list[TiedParameter]:
    """Whole parameters whose gradients add up over the tensor axis: each of its ranks holds a part."""
    group = mesh.group("tensor")
    return [TiedParameter(names[name], group, 1, "up::sums") for name in cut.sums]


def ties_of(
    model: nn.Module, stages: Sequence[nn.Module], rank_of: Sequence[int], mesh: PlanMesh
) -> list[TiedParameter]:
    """Parameters that stages on several ranks have. All ranks make the groups, in one order."""
    owners: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for parameter in module.parameters():
            owners.setdefault(parameter, set()).add(rank_of[stage])
    ties = []
    for name, parameter in model.named_parameters():
        ranks = sorted(owners.get(parameter, ()))
        if len(ranks) > 1:
            group = _group(mesh, ranks)
            if mesh.stage in ranks:
                ties.append(TiedParameter(name, group, len(ranks)))
    return ties


def _group(mesh: PlanMesh, ranks: list[int]) -> Any:
    """Make one group of these pipeline ranks for each place on the other axes; return this rank's."""
    return group_of(mesh.everyone.axes.mesh[ranks].flatten(1).t())
