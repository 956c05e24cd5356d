"""Spreads the experts of a model over ranks: finds the layers, keeps a copy for the trial, and cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.parallel.precision import kept_in_f32

from .axis import ExpertAxis
from .check import ExpertCheck, should_try
from .layers import ExpertLayer, expert_layers

if TYPE_CHECKING:
    from torch import nn

    from unisono.parallel.mesh import PlanMesh
    from unisono.parallel.plan import Plan


def spread(
    model: nn.Module,
    mesh: PlanMesh,
    experts: dict[str, str] | None,
    check: bool | None,
    fill: Callable[[nn.Module], object],
    output: Callable[[Any], Any],
    *,
    pieces: bool = False,
) -> tuple[ExpertAxis, ExpertCheck | None]:
    """Leave this rank its experts, in place; return their axis, and what tries it in the first step.

    Args:
        experts, check: see `parallelize`.
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
        pieces: stages are pieces, so that nothing is recorded for them.
    Raises:
        ValueError: no layer is known, or one cannot be spread or tried, or its experts are to keep f32; the
            text names it.
    """
    layers = expert_layers(model, experts, mesh.plan.expert, mesh.plan.tensor)
    _check_recorded(model, layers, mesh.plan, pieces)
    axis = ExpertAxis(model, layers, mesh)
    _check_exact(model, axis, kept_in_f32(model, mesh.plan))
    trial = ExpertCheck(model, axis, fill, output) if should_try(model, axis, check) else None
    axis.cut(model)
    return axis, trial


def _check_recorded(model: nn.Module, layers: list[ExpertLayer], plan: Plan, pieces: bool) -> None:
    """Refuse lists of experts where the program is recorded: the rows of each are what values decide."""
    axes = {
        "context": plan.context > 1,
        "tensor": plan.tensor > 1,
        "pipeline": plan.pipeline > 1 and not pieces,
    }
    axis = next((name for name, recorded in axes.items() if recorded), None)
    listed = next((layer.path for layer in layers if layer.kind == "list"), None)
    if axis is not None and listed is not None:
        remedy = "write pieces=[first, second, ...]" if axis == "pipeline" else f"leave out {axis}="
        raise ValueError(
            f'"{listed}" ({type(model.get_submodule(listed)).__name__}) is a list of experts, and {axis}='
            f"{getattr(plan, axis)} records the program, which picks their rows by values. Experts whose "
            f"parameters are stacked can be spread so. Or {remedy}"
        )


def _check_exact(model: nn.Module, axis: ExpertAxis, exact: Sequence[nn.Module]) -> None:
    """Refuse experts that keep f32: they would be reduced over all data ranks, which have others."""
    spread_over_ranks = {value for name, value in model.named_parameters() if name in axis.names}
    for path, module in model.named_modules():
        if module in exact and not spread_over_ranks.isdisjoint(module.parameters()):
            raise ValueError(
                f'"{path}" keeps f32 and has experts that expert={axis.ranks} spreads over ranks; these '
                "compute in the plan's precision. Name other modules in keep_f32, such as gates, or use "
                "precision='f32'"
            )
