"""Spreads the experts of a model over ranks: finds the layers, keeps a copy for the trial, and cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .axis import ExpertAxis
from .check import ExpertCheck, should_try
from .layers import expert_layers

if TYPE_CHECKING:
    from torch import nn

    from unisono.parallel.mesh import PlanMesh


def spread(
    model: nn.Module,
    mesh: PlanMesh,
    experts: dict[str, str] | None,
    check: bool | None,
    fill: Callable[[nn.Module], object],
    output: Callable[[Any], Any],
) -> tuple[ExpertAxis, ExpertCheck | None]:
    """Leave this rank its experts, in place; return their axis, and what tries it in the first step.

    Args:
        experts, check: see `parallelize`.
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
    Raises:
        ValueError: no layer is known, or one cannot be spread or tried; the text names it.
    """
    axis = ExpertAxis(model, expert_layers(model, experts, mesh.plan.expert), mesh)
    trial = ExpertCheck(model, axis, fill, output) if should_try(model, axis, check) else None
    axis.cut(model)
    return axis, trial
