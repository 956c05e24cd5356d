"""Spreads the experts of a model over ranks: finds the layers, keeps a copy for the trial, and cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.errors import UnfitError
from unisono.parallel.precision import kept_in_f32

from .axis import ExpertAxis
from .check import ExpertCheck, should_try
from .layers import ExpertLayer, caller_of, expert_layers

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
    *,
    pieces: bool = False,
) -> tuple[ExpertAxis | None, ExpertCheck | None]:
    """Leave this rank its experts, in place; return their axis, and what tries it in the first step.

    Without expert=, too, a layer that picks rows by values is one operator of a recorded program: a stacked
    one under context=, and what `experts` names. Its experts are then spread over the tensor ranks.

    Args:
        experts, check: see `parallelize`.
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
        pieces: stages are pieces, so that nothing is recorded for them.
    Raises:
        ValueError: no layer is known, or one cannot be spread or tried, or its experts are to keep f32; the
            text names it.
    """
    plan = mesh.plan
    layers = [] if plan.expert == plan.context == 1 and not experts else expert_layers(model, experts, plan)
    if not layers:
        return None, None
    recorded = plan.context > 1 or plan.tensor > 1 or (plan.pipeline > 1 and not pieces)
    if recorded:
        _check_within(model, layers)
    axis = ExpertAxis(model, layers, mesh, recorded=recorded)
    _check_exact(model, axis, kept_in_f32(model, plan))
    trial = ExpertCheck(model, axis, fill, output) if should_try(model, axis, check) else None
    axis.cut(model)
    return axis, trial


def _check_within(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Refuse a list that the model itself calls: all of its program would be one operator."""
    for layer in layers:
        if layer.kind == "list" and not caller_of(model, layer.path):
            raise UnfitError(
                f'{type(model).__name__} itself calls the experts of "{layer.path}", so nothing of its '
                "program is left to be cut by tensor, context or pipeline. Put the list, its router and what "
                "adds up the results into a module of their own"
            )


def _check_exact(model: nn.Module, axis: ExpertAxis, exact: Sequence[nn.Module]) -> None:
    """Refuse experts that keep f32: they would be reduced over all data ranks, which have others."""
    spread_over_ranks = {value for name, value in model.named_parameters() if name in axis.names}
    for path, module in model.named_modules():
        if module in exact and not spread_over_ranks.isdisjoint(module.parameters()):
            raise UnfitError(
                f'"{path}" keeps f32 and has experts that expert={axis.ranks} spreads over ranks; these '
                "compute in the plan's precision. Name other modules in keep_f32, such as gates, or use "
                "precision='f32'"
            )
