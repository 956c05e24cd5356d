"""The layers of experts in a model: how each one's experts are kept, whose they are, over which ranks.

| kind | what it is |
|---|---|
| `stacked` | a module called with (rows, indices, weights); its parameters begin with the dim of experts |
| `list` | an `nn.ModuleList` or `nn.ModuleDict` of experts |
| `whole` | experts that stay on every rank |

Recognised without being named are modules that take three arguments, with stacked parameters only, and their
number in an attribute, such as `num_experts`; and lists of alike modules whose name has "experts".
Nothing proves that a program uses them so: the first step compares (spread.py).

The expert axis lies inside the data axis: its ranks are next to each other, and have different rows. To an
expert's parameter, Plan(data=8, expert=2) is Plan(data=4, tensor=2): four ranks hold the same values.

Ranks of one tensor group have the same rows; each sends its share. So Plan(data=4, tensor=2, expert=2)
spreads experts over four ranks, and two ranks hold the same values.

A rank's experts get rows from all ranks of the axis, and so do their gradients. What averages over the ranks
with the same values leaves out the factor 1 / expert; `average` multiplies by it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from unisono.errors import UnfitError
from unisono.parallel.gradients import scale_
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.plan import Plan
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import axis_of
from unisono.torch_internals.training import module_at

from .listed import cut_listed
from .stacked import cut_stacked, numbers_of_experts

KINDS = ("stacked", "list", "whole")


class ExpertLayer(NamedTuple):
    """A layer of experts."""

    path: str
    kind: str
    experts: int


def check_experts(experts: object, plan: Plan) -> None:
    """Raise TypeError or ValueError for an argument `experts` of `parallelize` that is no such thing."""
    if experts is None:
        return
    if not isinstance(experts, dict) or not all(isinstance(pattern, str) for pattern in experts):
        raise TypeError(
            f"parallelize: experts is {experts!r:.60}, expected a dict, pattern of paths -> kind, such as "
            '{"layers.*.experts": "list"}'
        )
    for pattern, kind in experts.items():
        if kind not in KINDS:
            raise UnfitError(f'experts: "{pattern}" is {kind!r}; known are {", ".join(KINDS)}')
    if plan.expert == plan.tensor == plan.context == plan.pipeline == 1:
        raise UnfitError(
            "parallelize: experts= is for a plan that spreads them, or records the program: write "
            "Plan(data=n, expert=n)"
        )


def expert_layers(model: nn.Module, given: Mapping[str, str] | None, plan: Plan) -> list[ExpertLayer]:
    """Find the layers of experts of `model`, in the order of its modules.

    Args:
        given: pattern of paths -> kind, in place of what is recognised.
        plan: without expert=, what is recognised is stacked layers under context=, and there may be none.
    Raises:
        ValueError: there is none, or one cannot be spread; the text names it, and says what to write.
    """
    kinds = {path: kind for path, module in model.named_modules() if path and (kind := _kind(path, module))}
    if plan.expert == 1:  # another axis may cut a list as its program says
        kinds = {path: kind for path, kind in kinds.items() if kind == "stacked" and plan.context > 1}
    for pattern, kind in (given or {}).items():
        paths = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
        if not paths:
            raise UnfitError(f'experts: no module of {type(model).__name__} is called "{pattern}"')
        kinds |= dict.fromkeys(paths, kind)
    layers = [
        _layer(model, path, kinds[path], plan.expert, plan.tensor)
        for path, _ in model.named_modules()
        if kinds.get(path, "whole") != "whole"
    ]
    if not layers and plan.expert > 1:
        raise UnfitError(
            f"expert={plan.expert}: no module of {type(model).__name__} is known as a layer of experts. "
            "Known are modules that are called with (rows, indices, weights) and whose parameters have the "
            'dimension of experts first, and lists of alike modules whose name has "experts". Write '
            'parallelize(..., experts={"path.of.*.module": "stacked"}) or {"path.of.*.list": "list"}, or '
            f"leave out expert={plan.expert}"
        )
    _check_apart(model, layers)
    return layers


def parameters_of(model: nn.Module, layers: list[ExpertLayer]) -> list[str]:
    """The names of the experts' parameters."""
    return [
        f"{layer.path}.{name}"
        for layer in layers
        for name, _ in module_at(model, layer.path).named_parameters()
    ]


def caller_of(model: nn.Module, path: str) -> str:
    """The path of what calls the experts of a list: the list, if it can be called, or what it is in."""
    experts = module_at(model, path)
    base = nn.ModuleList if isinstance(experts, nn.ModuleList) else nn.ModuleDict
    own = type(experts).forward is not base.forward
    return path if own else path.rpartition(".")[0]


def _kind(path: str, module: nn.Module) -> str:
    """What a module is recognised as; empty: nothing."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        alike = len({tuple(_shapes(child)) for child in module.children()}) == 1
        named = "experts" in path.rpartition(".")[2] or type(module).__name__.endswith("Experts")
        return (
            "list" if named and alike and len(module) > 1 and any(True for _ in module.parameters()) else ""
        )
    return "stacked" if stacked_experts(module) else ""


def stacked_experts(module: nn.Module) -> int:
    """How many experts a layer of stacked ones has; 0: it is none."""
    count = _stacked(module)
    written = count > 1 and numbers_of_experts(module, count) and next(module.parameters()).dim() > 1
    return count if written else 0


def _stacked(module: nn.Module) -> int:
    """The first dimension of its own parameters, if it takes three arguments and has no others; else 0."""
    own = [*module.parameters(recurse=False)]
    sizes = {parameter.shape[0] if parameter.dim() else 0 for parameter in own}
    if len(sizes) != 1 or len(own) != len([*module.parameters()]):
        return 0
    try:
        return sizes.pop() if len(inspect.signature(module.forward).parameters) == 3 else 0
    except ValueError:  # a forward that is not Python
        return 0


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "", ()
    for name, parameter in module.named_parameters():
        yield name, tuple(parameter.shape)


def _layer(model: nn.Module, path: str, kind: str, parts: int, tensor: int) -> ExpertLayer:
    """Refuse what cannot be spread."""
    module = module_at(model, path)
    what = f'"{path}" ({type(module).__name__})'
    if kind == "stacked":
        experts = _stacked(module)
        if not experts:
            raise UnfitError(
                f"experts: {what} is not stacked: it needs parameters of its own only, with the dimension "
                "of experts first, and a forward of (rows, indices, weights). Give the path of the list as "
                '"list", or write "whole"'
            )
    else:
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not len(module):
            raise UnfitError(f"experts: {what} is no nn.ModuleList or nn.ModuleDict of experts")
        if len({tuple(_shapes(child)) for child in module.children()}) > 1:
            raise UnfitError(f'experts: the modules of {what} are not alike; write "whole"')
        experts = len(module)
    if experts % (parts * tensor):
        ranks = f"expert={parts}" + f" x tensor={tensor}" * (tensor > 1)
        raise UnfitError(
            f'{what} has {experts} experts, which {ranks} does not divide. Write experts={{"{path}": '
            '"whole"}, or another number'
        )
    if any(True for _ in module.buffers()):
        raise UnfitError(
            f"{what} has buffers, and experts whose buffers differ between ranks are not kept. Write "
            f'experts={{"{path}": "whole"}}'
        )
    if kind == "list" and any(parameter.is_meta for parameter in module.parameters()):
        raise UnfitError(
            f"{what} is a list of experts on the meta device. Build the model with its values, or write "
            f'experts={{"{path}": "whole"}}'
        )
    return ExpertLayer(path, kind, experts)


def _check_apart(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Each parameter of an expert has one place, and no layer of experts is within another."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    tied = {name: names for names in places.values() for name in names if len(names) > 1}
    for name in parameters_of(model, layers):
        if name in tied:
            one, other = tied[name][:2]
            raise UnfitError(
                f'"{one}" and "{other}" are one parameter, and one of them is that of an expert, which is on '
                'some ranks only. Write experts= with "whole" for its layer'
            )
    for inner, outer in itertools.permutations([layer.path for layer in layers], 2):
        if inner.startswith(f"{outer}."):
            raise UnfitError(
                f'experts: "{inner}" is within the experts of "{outer}". Write experts={{"{inner}": "whole"}}'
            )


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
            self._context = TensorAxis(mesh.context, mesh.index("context"), mesh.plan.context)
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
