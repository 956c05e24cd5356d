"""The experts of a model on the expert axis: whose parameters they are, and over which ranks.

The expert axis lies inside the data axis: its ranks are next to each other, and have different rows. To an
expert's parameter, Plan(data=8, expert=2) is Plan(data=4, tensor=2): four ranks hold the same values.

Ranks of one tensor group have the same rows; each sends its share. So Plan(data=4, tensor=2, expert=2)
spreads experts over four ranks, and two ranks hold the same values.

A rank's experts get rows from all ranks of the axis, and so do their gradients. What averages over the ranks
with the same values leaves out the factor 1 / expert; `average` multiplies by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from unisono.parallel.gradients import scale_
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import axis_of
from unisono.torch_internals.training import module_at

from .layers import ExpertLayer, caller_of, parameters_of
from .listed import cut_listed
from .stacked import cut_stacked


class ExpertAxis:
    """The layers of experts of one model; printed, it says where they are.

    Args:
        model: the user's.
        mesh: of the run.
        recorded: the program of the model is recorded for other axes.
    Attributes:
        mesh: of the experts' parameters. Its tensor axis is the expert axis.
        ranks: on the expert axis that have different rows.    tensor: those that have the same.
        layers: what is spread.
        names: of the experts' parameters, in the model before it was cut.
        runs_twice: the program around some experts does.
    """

    def __init__(
        self, model: nn.Module, layers: list[ExpertLayer], mesh: PlanMesh, *, recorded: bool
    ) -> None:
        self.mesh, self.layers, self.ranks = mesh.of_experts(), layers, mesh.plan.expert
        self.tensor = axis_of(mesh.part("tensor"))
        self._context = None
        if mesh.context is not None:
            self._context = TensorAxis(mesh.context, mesh.context_place, mesh.plan.context)
        self._model, self._recorded = model, recorded
        self.names = frozenset(parameters_of(model, layers))
        listed = [layer for layer in layers if layer.kind == "list"]
        self.runs_twice = bool(listed)
        self._listed = frozenset(parameters_of(model, listed))

    def cut(self, model: nn.Module, *, trial: bool = False) -> None:
        """Leave this rank its experts, in place. trial: sequences are whole, and gradients are not summed."""
        context = None if trial else self._context
        axis = self.mesh.part("tensor")
        for layer in self.layers:
            if layer.kind == "stacked":
                cut_stacked(layer.path, module_at(model, layer.path), axis, self.tensor)
            else:
                caller = caller_of(model, layer.path)
                cut_listed(model, layer.path, caller, axis, self.tensor, context, recorded=self._recorded)

    def modules(self) -> list[nn.Module]:
        """The modules of this rank whose parameters are gathered and reduced together."""
        found: list[nn.Module] = []
        for layer in self.layers:
            module = module_at(self._model, layer.path)
            here = [module] if layer.kind == "stacked" else [*module.children()]
            found += [one for one in here if any(True for _ in one.parameters())]
        return found

    def parameters(self) -> set[nn.Parameter]:
        """Those of this rank's experts."""
        return {parameter for module in self.modules() for parameter in module.parameters()}

    def average(self, named: Mapping[str, nn.Parameter]) -> None:
        """Make means over all rows of sums over this axis's ranks, in the gradients."""
        scale_([parameter for name, parameter in named.items() if name in self.names], 1.0 / self.ranks)

    def holds(self, where: str) -> bool:
        """Whether a label of a trace is of the experts: a path, or a bucket of their gradients."""
        paths = [layer.path for layer in self.layers]
        return where.startswith("experts, ") or any(f"{where}.".startswith(f"{path}.") for path in paths)

    def spread(self, name: str) -> int:
        """Over how many ranks different values of one name are spread that is whole on each.

        Example: 2 for a name of an expert in a list under expert=2: half of the data ranks have it.
        """
        return self.ranks * self.tensor.parts if name in self._listed else 1

    def __str__(self) -> str:
        lines = [f"experts on {self.ranks * self.tensor.parts} ranks each:"]
        lines += [f'  "{layer.path}": {layer.experts}, {layer.kind}' for layer in self.layers]
        return "\n".join(lines)
