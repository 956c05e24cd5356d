"""What differs between a model and its cut copy after the same micro-batch, and what to write then."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from unisono.torch_internals.training import module_at

from .gradients import gradient

if TYPE_CHECKING:
    from .mesh import PlanMesh
    from .structure import ModelStructure

TOLERANCE = 1e-3  # of the largest value; a right cut differs by 1e-6, a wrong one by 1e-1
FLOOR = (
    1e-2  # of the largest gradient: smaller gradients are compared with this, because they may be rounding
)


class ModelOutputs(NamedTuple):
    """What a copy of the model showed."""

    outputs: list[tuple[str, list[Tensor]]]  # path of each module that ended, in order
    loss: Tensor
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


def difference(alone: ModelOutputs, here: ModelOutputs) -> tuple[str, str] | None:
    """(the path of a module, what is wrong there); None: nothing."""
    largest = max((float(grad.abs().max()) for grad in _gradients(alone)), default=0.0)
    wrong = {
        name: deviation
        for name, parameter in alone.parameters.items()
        if parameter.requires_grad
        and (deviation := _gradient_deviation(parameter, here.parameters[name], largest))
    }
    loss = relative_difference(alone.loss, here.loss)
    stale = {
        name: deviation
        for name, b in alone.buffers.items()
        if (deviation := relative_difference(b, here.buffers[name]))
    }
    if not wrong and not loss and not stale:
        return None
    for (path, first), (place, second) in zip(alone.outputs, here.outputs, strict=False):
        if path != place:
            break  # they call different modules from here on
        for one, other in zip(first, second, strict=False):
            if one.shape == other.shape and (deviation := relative_difference(one, other)):
                return path, f"its output differs by {deviation:.1e} of its largest value"
    if wrong:
        order = {path: number for number, (path, _) in enumerate(alone.outputs)}
        name = max(wrong, key=lambda name: order.get(name.rpartition(".")[0], -1))
        path, _, leaf = name.rpartition(".")
        return path, f"the gradient of {leaf} differs by {wrong[name]:.1e} of its largest value"
    if stale:
        name = next(iter(stale))
        return name.rpartition(".")[0], f"its buffer {name.rpartition('.')[2]} differs by {stale[name]:.1e}"
    return "", f"the loss differs by {loss:.1e}"


def _gradients(seen: ModelOutputs) -> list[Tensor]:
    return [p.grad for p in seen.parameters.values() if p.grad is not None and p.grad.numel()]


def relative_difference(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The largest difference, as a share of the largest value; 0.0 within the tolerance."""
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return 0.0
    most = max(float(one.abs().max()), floor, 1e-30)
    deviation = float((one - other).abs().max()) / most
    return 0.0 if deviation <= TOLERANCE else deviation  # NaN: both have it, or the model is none to train


def _gradient_deviation(whole: nn.Parameter, cut: nn.Parameter, largest: float) -> float:
    mine = gradient(cut)
    full = whole.grad if whole.grad is not None else torch.zeros_like(whole)
    if isinstance(cut, DTensor):
        for axis, placement in enumerate(cut.placements):
            if isinstance(placement, Shard):
                mesh = cut.device_mesh
                full = full.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return relative_difference(full, torch.zeros_like(full) if mine is None else mine, FLOOR * largest)


def differing_gradients(parameters: dict[str, nn.Parameter], mesh: PlanMesh) -> tuple[str, str] | None:
    """What ranks of the tensor axis hold whole, and give different gradients with dropout."""
    for name, parameter in parameters.items():
        if parameter.grad is None or isinstance(parameter, DTensor):
            continue
        most = parameter.grad.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.group("tensor"))
        deviation = torch.tensor(relative_difference(most, parameter.grad), device=most.device)
        dist.all_reduce(deviation, op=dist.ReduceOp.MAX, group=mesh.group("tensor"))
        if deviation:
            return name.rpartition(".")[0], (
                f"with dropout, ranks give {name.rpartition('.')[2]} different gradients: they "
                "draw different random numbers for what all of them hold"
            )
    return None


def text(tensor: int, model: nn.Module, structure: ModelStructure, path: str, what: str) -> str:
    """The error of a plan that does not train as one process does. path: of the first module that differs."""
    kind = type(module_at(model, path)).__name__
    where = f'"{path}" ({kind})' if path else f"{kind}"
    if what.startswith("the gradient"):
        what += ": each rank sees its own features (or heads) only"
    return (
        f"tensor={tensor} does not train {type(model).__name__} as one process does. In {where}, {what}. "
        "Between a layer cut by column and the next one cut by row, every function must take each feature "
        f"(or head) by itself, and no parameter may be whole. {_remedy(tensor, structure, path)}"
    )


def _remedy(tensor: int, structure: ModelStructure, path: str) -> str:
    """What to write: the cut modules of the smallest module around `path` stay whole."""
    cut = [place for place, kind in structure.kinds.items() if kind != "whole"]
    while path:
        path = path.rpartition(".")[0]
        inside = [place for place in cut if not path or place.startswith(f"{path}.")]
        if inside:
            break
    else:
        inside = cut
    *above, last = path.split(".")
    pattern = ".".join([*("*" if part.isdigit() else part for part in above), last, "*"])
    patterns = [pattern] if path else inside
    if all(any(fnmatchcase(place, pattern) for pattern in patterns) for place in cut):
        return f"Leave out tensor={tensor}: nothing else of this model is cut"
    return "Write cuts={" + ", ".join(f'"{pattern}": "whole"' for pattern in patterns) + "}"
