"""`shard(op, strategy)`: an operator that runs cut in parts, and brings its inputs into the layouts it
needs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from unisono.parallel.batches import fingerprint
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals.fake import is_fake

from .operators import IndexPosition, Indices, OperatorSignature, Owners, rule_of
from .redistribute import SUM, WHOLE, Layout, layout_of, mesh_of, moved, placed, primes, span

Strategy = Sequence[Sequence[int]]


def shard(op: Any, strategy: Strategy) -> Any:
    """Cut `op` by `strategy`.

    Args:
        op: a function of torch (see `operators.RULES`), or an nn.Linear, nn.Embedding or nn.LayerNorm.
        strategy: for each input tensor, for each of its dims, the number of parts. For a module the first
            entry is for its input; then come its parameters.
    Returns:
        A function, or a module, of tensors and DTensors. A plain tensor counts as replicated, the same on
        every rank. The result is a DTensor; `whole(result)` is the plain tensor.
    Raises:
        ValueError: the strategy is invalid; the text names the operator, the dimension and both numbers.
    Example (4 ranks): y = shard(torch.matmul, ((4, 1), (1, 1)))(x, w), then shard(torch.matmul, ((1, 1), (1,
    4)))(y, v):
        there is one all_gather of y between the two.
    """
    if isinstance(op, nn.Module):
        return Sharded(op, strategy)
    rule_of(op)
    return functools.partial(_run, _FirstCall(op.__name__), op, strategy)


def whole(value: Tensor) -> Tensor:
    """Return a DTensor's value as a plain tensor, whole on every rank; differentiable."""
    if not isinstance(value, DTensor):
        return value
    goal = (WHOLE,) * len(primes(dist.get_world_size()))
    return moved(_known(value), goal, goal, "whole")


class Sharded(nn.Module):
    """A module with cut parameters, whose operator runs on the parts."""

    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        super().__init__()
        name, parameters = type(module).__name__, dict(module.named_parameters(recurse=False))
        function, named = _function_of(module)
        self._call = functools.partial(_run, _FirstCall(name), function, strategy, **named)
        if len(strategy) != 1 + len(parameters):
            raise ValueError(
                f"{name}: the strategy has {len(strategy)} entries, its input and parameters "
                f"({', '.join(parameters)}) are {1 + len(parameters)}"
            )
        for (path, parameter), cuts in zip(parameters.items(), strategy[1:], strict=True):
            value = _run(_FirstCall(f"{name}.{path}"), torch.clone, [cuts], parameter.detach())
            self.register_parameter(path, nn.Parameter(value, requires_grad=parameter.requires_grad))

    def forward(self, x: Tensor) -> DTensor:
        result: DTensor = self._call(x, *self.parameters())
        return result


def _function_of(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    if isinstance(module, nn.Linear):
        return functional.linear, {}
    if isinstance(module, nn.Embedding) and module.padding_idx is None and module.max_norm is None:
        return functional.embedding, {}
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return functional.layer_norm, {"eps": module.eps}
    raise ValueError(
        f"shard: no rule for {module}; there are rules for Linear, Embedding without padding_idx and "
        "max_norm, and LayerNorm over the last dimension. Shard its functions instead"
    )


# ---- a call ----


@contextlib.contextmanager
def planned(plan: Any) -> Iterator[None]:
    """A plan of several ranks runs a model meanwhile, which may not shard by itself."""
    before = _plan.set(str(plan) if plan.ranks > 1 else "")
    try:
        yield
    finally:
        _plan.reset(before)


_plan: ContextVar[str] = ContextVar("plan", default="")


class _FirstCall:
    """Checks the calls of one sharded operator; the first one compares its plain inputs."""

    def __init__(self, name: str) -> None:
        self.name, self._compared = name, False

    def check(self, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Raise ValueError, on all ranks, in a model that a plan runs, or where plain inputs differ."""
        for key, value in named.items():
            if isinstance(value, Tensor):
                raise ValueError(f"shard({self.name}): give tensors by position, not {key}=")
        if _plan.get():
            raise ValueError(
                f"shard({self.name}) within a model under {_plan.get()}: shard takes plain tensors as "
                "replicated on all ranks, and a plan gives ranks other rows, or parts. Leave out shard, and "
                "write tensor= in the plan; or train with shard alone, without parallelize"
            )
        plain = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, DTensor)]
        if self._compared or any(one.is_meta or is_fake(one) for one in plain):
            return
        self._compared = True
        marks = on_every_rank(lambda: fingerprint(plain))
        other = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
        if other is not None:
            raise ValueError(
                f"shard({self.name}): plain tensors count as replicated, and those of rank {other} have "
                "other shapes, types or values than those of rank 0. Give all ranks the same, such as "
                "parameters made from one seed and the whole batch"
            )


def _run(first: _FirstCall, function: Any, strategy: Strategy, *args: Any, **named: Any) -> DTensor:
    first.check(args, named)
    tensors = [_known(arg) for arg in args if isinstance(arg, Tensor)]
    others = [arg for arg in args if not isinstance(arg, Tensor)]
    lies = tuple((tuple(tensor.shape), tensor.element_size(), layout_of(tensor)) for tensor in tensors)
    cuts, name = tuple(map(tuple, strategy)), first.name
    given = _hashable(others), tuple(zip(named, _hashable(named.values()), strict=True))
    signature, sizes, owners = _planned(name, function, cuts, dist.get_world_size(), lies, *given)
    locals_ = []
    for number, (tensor, indices) in enumerate(zip(tensors, signature.inputs, strict=True)):
        goal, contributed = _layout(indices, owners), _layout(indices, owners, elsewhere=SUM)
        locals_.append(moved(tensor, goal, contributed, f"{name}, input {number}"))
    mesh = mesh_of(tensors[0].device.type)
    local = signature.local(IndexPosition(name, sizes, owners, mesh), *locals_)
    shape = [sizes[i] if i else size for i, size in zip(signature.output, local.shape, strict=True)]
    return placed(local, mesh, _layout(signature.output, owners, elsewhere=SUM), shape)


def _hashable(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)


@functools.lru_cache(maxsize=4096)
def _planned(
    name: str, function: Any, strategy: Strategy, ranks: int, lies: Any, others: Any, named: Any
) -> tuple[OperatorSignature, dict[str | None, int], Owners]:
    """The signature of a call, the sizes of its indices, and which mesh axes cut them.

    Args:
        lies: shape, bytes of an element, and layout of each input.
    """
    shapes = [shape for shape, *_ in lies]
    signature = rule_of(function)(*shapes, *others, **dict(named))
    parts = _parts(name, strategy, signature, shapes)
    owners = _nearest(parts, signature.inputs, lies, primes(ranks))
    inputs = [*zip(signature.inputs, shapes, strict=True)]
    sizes = {index: size for indices, shape in inputs for index, size in zip(indices, shape, strict=True)}
    return signature, sizes | signature.leads, owners


def _known(value: Tensor) -> Tensor:
    """A plain tensor, or a DTensor on the mesh. What DTensor's operators have left as a mean, DTensor makes
    whole.
    """
    if not isinstance(value, DTensor):
        return value
    mesh = mesh_of(value.device.type)
    if value.device_mesh != mesh:
        raise ValueError(f"shard: a DTensor on {value.device_mesh}; operators run on {mesh}")
    known = all(type(each) in (Replicate, Shard) or each == SUM for each in value.placements)
    return value if known else value.redistribute(placements=[WHOLE] * mesh.ndim)


# ---- strategies ----


def _parts(
    name: str, strategy: Strategy, signature: OperatorSignature, shapes: Sequence[tuple[int, ...]]
) -> dict[str, int]:
    """The number of parts of each index; checks the strategy against the signature and the shapes."""
    if len(strategy) != len(shapes):
        raise ValueError(f"{name}: the strategy has {len(strategy)} entries for {len(shapes)} inputs")
    found: dict[str, tuple[int, int, int]] = {}  # index -> parts, and where it was given
    for number, (cuts, indices, shape) in enumerate(zip(strategy, signature.inputs, shapes, strict=True)):
        if len(cuts) != len(shape):
            raise ValueError(
                f"{name}: input {number} has {len(shape)} dimensions, its strategy {tuple(cuts)} {len(cuts)}"
            )
        for dim, (cut, index, size) in enumerate(zip(cuts, indices, shape, strict=True)):
            at = f"{name}: dimension {dim} of input {number}"
            if cut < 1:
                raise ValueError(f"{at} cannot be cut into {cut} parts")
            if not _smallest(size, cut):
                raise ValueError(f"{at} is {size}: of {cut} parts some would be empty")
            if index is None:
                if cut != 1:
                    raise ValueError(f"{at} is broadcast from size 1 and cannot be cut into {cut} parts")
                continue
            if cut > 1 and index in signature.whole:
                raise ValueError(f"{at} cannot be cut into {cut} parts: {signature.whole[index]}")
            lead = signature.leads.get(index, 0)
            if lead and (size % cut or lead % cut):
                raise ValueError(
                    f"{at} is {size} and becomes a dimension of {lead}, which {cut} parts do not divide"
                )
            known, *where = found.setdefault(index, (cut, number, dim))
            if known != cut:
                raise ValueError(
                    f"{at} is cut into {cut} parts, dimension {where[1]} of input {where[0]} into "
                    f"{known}; they are one index of the operator and must be cut alike"
                )
    parts = {index: cut for index, (cut, *_) in found.items()}
    ranks, needed = dist.get_world_size(), math.prod(parts.values())
    product = " x ".join(str(cut) for cut in parts.values() if cut > 1)
    if needed > ranks:
        raise ValueError(f"{name}: the strategy needs {product} = {needed} ranks, there are {ranks}")
    if ranks % needed:
        raise ValueError(f"{name}: the strategy's {product} = {needed} parts do not divide {ranks} ranks")
    return parts


def _assignments(parts: dict[str, int], sizes: Sequence[int]) -> Iterator[Owners]:
    """Every assignment of mesh axes to indices that gives each index its number of parts."""
    cut = [index for index, count in parts.items() if count > 1]
    for owners in itertools.product([*cut, None], repeat=len(sizes)):
        got = dict.fromkeys(parts, 1)
        for owner, size in zip(owners, sizes, strict=True):
            if owner is not None:
                got[owner] *= size
        if got == parts:
            yield owners


def _smallest(size: int, cut: int) -> int:
    axes = primes(cut)
    places = itertools.product(*map(range, axes))
    return min(span(size, [*zip(axes, place, strict=True)])[1] for place in places)


def _nearest(parts: dict[str, int], inputs: Sequence[Indices], lies: Any, axes: Sequence[int]) -> Owners:
    """The mesh axes of each index with which most bytes stay where they are."""

    def stays(owners: Owners) -> int:
        return sum(
            math.prod(shape) * itemsize
            for (shape, itemsize, layout), indices in zip(lies, inputs, strict=True)
            for start, goal in zip(layout, _layout(indices, owners), strict=True)
            if start in (goal, WHOLE)
        )

    return max(_assignments(parts, axes), key=stays)


@functools.lru_cache(maxsize=4096)
def _layout(indices: Indices, owners: Owners, elsewhere: Any = WHOLE) -> Layout:
    """Where these indices lie. `elsewhere`: the placement on an axis that cuts an index which they have not:
    SUM for what a rank contributes, since the others contribute the rest.
    """
    return tuple(
        WHOLE if owner is None else Shard(indices.index(owner)) if owner in indices else elsewhere
        for owner in owners
    )
