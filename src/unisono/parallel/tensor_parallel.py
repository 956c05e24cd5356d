"""Modules on the tensor axis: cut by column, by row or by vocabulary. Parameters become DTensors of that
axis.

A column cut leaves its output cut by features; the row cut after it takes that and adds up. Between the two
no byte moves, so one pair costs one all-reduce in forward and one in backward (Megatron-LM,
arXiv:1909.08053).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from .generators import RngRegion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["KINDS", "cut_modules", "like"]


class CutLayout(NamedTuple):
    """How a kind of cut places weight, bias, input and output."""

    weight: Placement
    bias: Placement
    input_layout: Placement
    output_layout: Placement


IN, OUT = Shard(0), Shard(1)  # of a weight [in, out], as Conv1D of transformers has it; Linear's is [out, in]
CUTS = {
    "column": CutLayout(OUT, Shard(0), Replicate(), Shard(-1)),
    "column, gathered": CutLayout(OUT, Shard(0), Replicate(), Replicate()),
    "row": CutLayout(IN, Replicate(), Shard(-1), Replicate()),
    "vocabulary": CutLayout(IN, Replicate(), Replicate(), Replicate()),
}
KINDS = (*CUTS, "whole")


def cut_modules(model: nn.Module, cuts: dict[str, str], mesh: DeviceMesh) -> RngRegion:
    """Cut the named modules of `model` in place; return its cut regions. Tied weights stay tied.

    Args:
        cuts: path of a module -> kind, one of KINDS.
        mesh: the tensor axis.
    Raises:
        ValueError: a module cannot be cut so, or a weight is tied to a module that is not cut alike.
    """
    ties, region = _ties(model), RngRegion(mesh.get_local_rank(), mesh.device_type)
    for path, kind in cuts.items():
        if kind != "whole":
            _cut(path, model.get_submodule(path), kind, mesh, region)
    for places in ties:
        _tie(model, places)
    return region


def _cut(path: str, module: nn.Module, kind: str, mesh: DeviceMesh, region: RngRegion) -> None:
    if kind not in CUTS:
        raise ValueError(
            f'"{path}" ({type(module).__name__}) is no layer that the rule can cut. Write cuts= with '
            f'"{path}" and the other modules of its block as "whole", or leave out tensor='
        )
    how = CUTS[kind]
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        raise ValueError(f'"{path}" ({type(module).__name__}) has no matrix named weight; cut it "whole"')
    turned, gathered = isinstance(module, nn.Linear), kind == "column, gathered"
    placed = _turned(how.weight) if turned else how.weight
    assert isinstance(placed, Shard)
    if weight.shape[placed.dim] % mesh.size():
        raise ValueError(
            f'"{path}" ({type(module).__name__}) cannot be cut by {kind}: dimension {placed.dim} of '
            f"its weight is {weight.shape[placed.dim]}, which tensor={mesh.size()} does not divide"
        )

    def partition(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in part.named_parameters(recurse=False):
            placement = placed if name == "weight" else how.bias
            value = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            part.register_parameter(name, like(parameter, value))

    def input_layout(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if kind == "row":
            region.end()
        if isinstance(inputs[0], DTensor):  # recomputed: saved as it was after this hook
            return inputs
        return (DTensor.from_local(inputs[0], mesh, [how.input_layout], run_check=False), *inputs[1:])

    def output_layout(_module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        with record_function(f"up::tensor|{path}"):
            value: Tensor = output.redistribute(mesh, [how.output_layout]).to_local()
        if kind == "column":
            region.begin()
        return value.clone() if gathered else value  # what a model returns is no view: see units

    hooks: Any = {"partition_fn": partition, "input_fn": input_layout, "output_fn": output_layout}
    distribute_module(module, mesh, **hooks)


def like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make the parameter that stands for `old`: frozen where it is, with what the user noted on it."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(vars(old))
    return new


def _turned(placement: Placement) -> Placement:
    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def _ties(model: nn.Module) -> list[list[str]]:
    """Paths of each parameter that has several."""
    places: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(path)
    return [paths for paths in places.values() if len(paths) > 1]


def _tie(model: nn.Module, places: list[str]) -> None:
    first = model.get_parameter(places[0])
    for place in places[1:]:
        other = model.get_parameter(place)
        if getattr(other, "placements", None) != getattr(first, "placements", None):
            raise ValueError(
                f'"{places[0]}" and "{place}" are one parameter, but are cut differently: cut them alike'
            )
        path, _, name = place.rpartition(".")
        model.get_submodule(path).register_parameter(name, first)
