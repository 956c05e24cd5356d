"""The gradients of all ranks as one vector: its norm, its verdict, its clipping, and tied parameters.

A parameter that several ranks hold is counted once. Sums are made in f64, so that a finite gradient never
overflows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.torch_internals.training import copy_each_, multiply_each_

from .graph.cut import Cut
from .mesh import PlanMesh, group_of

SUMS = "up::sums"


class TiedParameter(NamedTuple):
    """A parameter whose gradients on several ranks add up, and the group of those ranks.

    Args:
        ranks: how many of them count it as theirs: those of several stages do, a tensor group counts once.
        label: of the sum in a trace.
    """

    name: str
    group: dist.ProcessGroup
    ranks: int
    label: str = "up::tied"


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def cut_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have whole, cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def span(size: int, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Where a rank's part of a dim begins, and its size, as DTensor cuts it.

    Args:
        places: of each axis that cuts it, the number of parts and the rank's place.
    Example: 5 in 2 x 2 parts: 2, 1, 1, 1 elements; the third begins at 3.
    """
    start = 0
    for parts, place in places:
        most = -(-size // parts)
        before = min(place * most, size)
        start, size = start + before, min(most, size - before)
    return start, size


def wide_copy(parameter: Tensor) -> Tensor:
    """Return a copy of this rank's part: in f32, or in the parameter's own type where that one holds more."""
    value = local(parameter.detach())
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)


def gradient(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of the gradient, cut as the parameter is: a partial sum is reduced first."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


def copies(parameter: Tensor, mesh: PlanMesh) -> int:
    """Return how many ranks of a stage hold the same part of `parameter`.

    Example: data=4, tensor=2, zero=1: 2 for a norm's weight, 1 for a matrix that is cut by column.
    """
    cut = 1
    if isinstance(parameter, DTensor):
        placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        cut = math.prod(
            size for placement, size in placed if isinstance(placement, Shard) or _strided(placement)
        )
    return mesh.plan.copies * mesh.plan.tensor // cut


def _strided(placement: object) -> bool:
    """Whether it is fully_shard's placement of what the tensor axis cuts in the same dimension: no Shard."""
    return type(placement).__name__ == "_StridedShard"


@torch.no_grad()
def squared_norm(
    named: dict[str, nn.Parameter],
    ties: Iterable[TiedParameter],
    mesh: PlanMesh,
    spread: Callable[[str], int] = lambda _: 1,
    stored: Mapping[nn.Parameter, Tensor] | None = None,
) -> Tensor:
    """Return this rank's part of the squared norm, f64 []. The sum over all ranks is that of the whole
    gradient.

    Args:
        spread: of a name -> n, where one of n data ranks has it, and not all.
        stored: the norms of gradients that are not in memory.
    """
    shared: dict[str, int] = {}
    for tie in ties:
        shared[tie.name] = shared.get(tie.name, 1) * tie.ranks
    norms: list[Tensor] = []
    shares: list[float] = []  # of each parameter's squared norm, as several ranks add it up
    for name, parameter in named.items():
        grad = gradient(parameter)
        norm = (stored or {}).get(parameter) if grad is None else norm_of(grad)
        if norm is not None:
            norms.append(norm)
            shares.append(spread(name) / (copies(parameter, mesh) * shared.get(name, 1)))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=mesh.axes.device_type)
    return sum_of_squares(torch.stack(norms), shares)


def norm_of(grad: Tensor) -> Tensor:
    """The norm of one gradient, f64 []. A complex one counts as its real and imaginary parts."""
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm


def bits_of(value: Tensor) -> Tensor:
    """A tensor's values as integers of their size, f32 as int32."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    if not real.is_floating_point():
        return real.detach()
    types = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.detach().contiguous().view(types[real.element_size()])


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; a NaN is like another one."""
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


def sum_of_squares(norms: Tensor, shares: Sequence[float]) -> Tensor:
    """Add up squared norms, each times its share: in one order, so that all ways have the same bits."""
    return (norms * norms * norms.new_tensor(shares)).sum()


@torch.no_grad()
def scale_(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by `factor`, in place."""
    if factor == 1.0:
        return
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        multiply_each_(grads, factor)


def add_up(named: dict[str, nn.Parameter], ties: Iterable[TiedParameter]) -> None:
    """Sum the gradients of tied parameters over the ranks that have them. `named`: what is trained.

    Those of a tensor group, mostly norms and biases, travel in one message. A parameter without a gradient on
    any of its ranks keeps none: an optimizer must not move it.
    """
    trained = [tie for tie in ties if tie.name in named and named[tie.name].requires_grad]
    used = _used([tie for tie in trained if tie.ranks > 1], named)
    together: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = {}
    for tie in trained:
        parameter = named[tie.name]
        if parameter.grad is None and (tie.ranks == 1 or not used[tie.name]):
            continue  # all ranks of a tensor group run one program: none of them has a gradient
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):  # not a partial sum
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        grad = local(parameter.grad)
        if tie.ranks == 1:
            together.setdefault((tie.group, grad.dtype), []).append(grad)
            continue
        with record_function(f"{tie.label}|{tie.name}"):
            dist.all_reduce(grad, group=tie.group)
    for (group, _), grads in together.items():
        flat = torch.cat([grad.flatten() for grad in grads])
        with record_function(f"{SUMS}|{len(grads)} parameters"):
            dist.all_reduce(flat, group=group)
        sums = flat.split([grad.numel() for grad in grads])
        copy_each_(grads, [part.view(grad.shape) for part, grad in zip(sums, grads, strict=True)])


def _used(ties: list[TiedParameter], named: dict[str, nn.Parameter]) -> dict[str, bool]:
    """Whether each of these has a gradient on some rank."""
    found: dict[str, bool] = {}
    for group in dict.fromkeys(tie.group for tie in ties):
        here = [tie for tie in ties if tie.group == group]
        flags = torch.tensor([float(named[tie.name].grad is not None) for tie in here])
        flags = flags.to(local(named[here[0].name]).device)
        with record_function(f"{here[0].label}|gradients that are None"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        found.update((tie.name, flag > 0) for tie, flag in zip(here, flags.tolist(), strict=True))
    return found


# ---- parameters that several ranks hold ----


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
            # one group of these pipeline ranks for each place on the other axes
            group = group_of(mesh.everyone.axes.mesh[ranks].flatten(1).t())
            if mesh.stage in ranks:
                ties.append(TiedParameter(name, group, len(ranks)))
    return ties
