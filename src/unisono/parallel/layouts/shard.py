"""`shard(op, strategy)`: an operator that runs cut in parts, and brings its inputs into the layouts it
needs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from unisono.parallel.batches import fingerprint
from unisono.torch_internals.fake import is_fake

from .cost import Link
from .grid import RankGrid, grid_of
from .operators import OperatorSignature, rule_of
from .redistribute import Layout, redistribute, transform_path

Strategy = Sequence[Sequence[int]]
Owners = tuple[str | None, ...]  # for each mesh axis, the index it cuts


def shard(op: Any, strategy: Strategy, *, link: Link | None = None) -> Any:
    """Cut `op` by `strategy`.

    Args:
        op: a function of torch (see `operators.RULES`), or an nn.Linear, nn.Embedding or nn.LayerNorm.
        strategy: for each input tensor, for each of its dims, the number of parts. For a module the first
            entry is for its input; then come its parameters.
        link: prices for choosing how values move.
    Returns:
        A function, or a module, of tensors and DTensors. A plain tensor counts as replicated, the same on
        every rank. The result is a DTensor; `whole(result)` is the plain tensor.
    Raises:
        ValueError: the strategy is invalid; the text names the operator, the dimension and both numbers.
    Example (4 ranks): y = shard(torch.matmul, ((4, 1), (1, 1)))(x, w), then shard(torch.matmul, ((1, 1), (1,
    4)))(y, v):
        there is one all_gather of y between the two.
    """
    price = link or Link()
    if isinstance(op, nn.Module):
        return Sharded(op, strategy, price)
    rule_of(op)
    first = _FirstCall(op.__name__)

    def run(*args: Any, **named: Any) -> DTensor:
        first.check(args)
        return _run(op, strategy, price, args, named)

    return run


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
        self._name, self._compared = name, False

    def check(self, args: Any) -> None:
        """Raise ValueError, on all ranks, in a model that a plan runs, or where plain inputs differ."""
        if _plan.get():
            raise ValueError(
                f"shard({self._name}) within a model under {_plan.get()}: shard takes plain tensors as "
                f"replicated on "
                "all ranks, and a plan gives ranks other rows, or parts. Leave out shard, and write "
                "tensor= in the plan; "
                "or train with shard alone, without parallelize"
            )
        plain = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, DTensor)]
        if self._compared or any(one.is_meta or is_fake(one) for one in plain):
            return
        self._compared = True
        marks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(marks, fingerprint(plain))
        if len(set(marks)) > 1:
            other = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
            raise ValueError(
                f"shard({self._name}): plain tensors count as replicated, and those of rank {other} have "
                f"other shapes, "
                "types or values than those of rank 0. Give all ranks the same, such as parameters made "
                "from one seed "
                "and the whole batch"
            )


def whole(value: Tensor, link: Link | None = None) -> Tensor:
    """Return a DTensor's value as a plain tensor, whole on every rank; differentiable."""
    if not isinstance(value, DTensor):
        return value
    grid = grid_of(dist.group.WORLD)
    goal = tuple(Replicate() for _ in grid.sizes)
    moved = redistribute(value, goal, grid, link or Link(), "whole")
    local: Tensor = moved.to_local(grad_placements=goal)
    return local


class Sharded(nn.Module):
    """A module with cut parameters, whose operator runs on the parts."""

    def __init__(self, module: nn.Module, strategy: Strategy, link: Link) -> None:
        super().__init__()
        self._function, self._named = _function_of(module)
        self._strategy, self._link = strategy, link
        self._first = _FirstCall(type(module).__name__)
        grid = grid_of(dist.group.WORLD)
        parameters = dict(module.named_parameters(recurse=False))
        if len(strategy) != 1 + len(parameters):
            raise ValueError(
                f"{type(module).__name__}: the strategy has {len(strategy)} entries, its input and "
                f"parameters "
                f"({', '.join(parameters)}) are {1 + len(parameters)}"
            )
        for (name, parameter), cut in zip(parameters.items(), strategy[1:], strict=True):
            value = _shard_value(f"{type(module).__name__}.{name}", parameter.data, cut, grid, link)
            self.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))

    def forward(self, x: Tensor) -> DTensor:
        self._first.check([x])
        return _run(self._function, self._strategy, self._link, (x, *self.parameters()), self._named)


def _function_of(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    if isinstance(module, nn.Linear):
        return functional.linear, {}
    if isinstance(module, nn.Embedding) and module.padding_idx is None and module.max_norm is None:
        return functional.embedding, {}
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return functional.layer_norm, {"eps": module.eps}
    raise ValueError(
        f"shard: no rule for {module}; there are rules for Linear, Embedding without padding_idx and "
        f"max_norm, and "
        "LayerNorm over the last dimension. Shard its functions instead"
    )


# ---- strategies ----


@dataclass(frozen=True)
class _OperatorCall:
    """An operator on its inputs: the number of parts of each index."""

    name: str
    signature: OperatorSignature
    parts: dict[str, int]


def _operator_call(
    function: Any, strategy: Strategy, signature: OperatorSignature, shapes: list[tuple[int, ...]]
) -> _OperatorCall:
    """Check the strategy against the signature and the shapes."""
    name = function.__name__
    if len(strategy) != len(shapes):
        raise ValueError(f"{name}: the strategy has {len(strategy)} entries for {len(shapes)} inputs")
    parts: dict[str, tuple[int, int, int]] = {}  # index -> parts, and where it was given
    for number, (cuts, indices, shape) in enumerate(zip(strategy, signature.inputs, shapes, strict=True)):
        if len(cuts) != len(shape):
            raise ValueError(
                f"{name}: input {number} has {len(shape)} dimensions, its strategy {tuple(cuts)} {len(cuts)}"
            )
        for dim, (cut, index, size) in enumerate(zip(cuts, indices, shape, strict=True)):
            at = f"{name}: dimension {dim} of input {number}"
            if cut < 1:
                raise ValueError(f"{at} cannot be cut into {cut} parts")
            if size % cut:
                raise ValueError(f"{at} is {size}, which {cut} parts do not divide")
            if index is None:
                if cut != 1:
                    raise ValueError(f"{at} is broadcast from size 1 and cannot be cut into {cut} parts")
                continue
            if cut > 1 and index in signature.whole:
                raise ValueError(f"{at} cannot be cut into {cut} parts: {signature.whole[index]}")
            if signature.leads.get(index, cut) % cut:
                raise ValueError(
                    f"{at} becomes a dimension of {signature.leads[index]}, which {cut} parts do not divide"
                )
            known, *where = parts.setdefault(index, (cut, number, dim))
            if known != cut:
                raise ValueError(
                    f"{at} is cut into {cut} parts, dimension {where[1]} of input {where[0]} into "
                    f"{known}; they are one "
                    "index of the operator and must be cut alike"
                )
    _check_ranks(name, [cut for cut, *_ in parts.values()])
    return _OperatorCall(name, signature, {index: cut for index, (cut, *_) in parts.items()})


def _check_ranks(name: str, cuts: Sequence[int]) -> None:
    ranks, needed = dist.get_world_size(), math.prod(cuts)
    product = " x ".join(str(cut) for cut in cuts if cut > 1)
    if needed > ranks:
        raise ValueError(f"{name}: the strategy needs {product} = {needed} ranks, there are {ranks}")
    if ranks % needed:
        raise ValueError(f"{name}: the strategy's {product} = {needed} parts do not divide {ranks} ranks")


def _assignments(parts: dict[str, int], sizes: Sequence[int]) -> Iterator[Owners]:
    """Every assignment of mesh axes to indices that gives each index its number of parts."""
    cut = [index for index, count in parts.items() if count > 1]
    for owners in itertools.product([*cut, None], repeat=len(sizes)):
        got = dict.fromkeys(cut, 1)
        for owner, size in zip(owners, sizes, strict=True):
            if owner is not None:
                got[owner] *= size
        if all(got[index] == parts[index] for index in cut):
            yield owners


def _layout(indices: Sequence[str | None], owners: Owners) -> Layout:
    return tuple(
        Shard(indices.index(owner)) if owner in indices and owner else Replicate() for owner in owners
    )


def _shard_value(name: str, value: Tensor, cuts: Sequence[int], grid: RankGrid, link: Link) -> DTensor:
    """A whole tensor, cut."""
    indices = tuple(f"i{dim}" for dim in range(value.dim()))
    signature = OperatorSignature((indices,), indices, lambda _, x: x)
    function = type("parameter", (), {"__name__": name})
    asked = _operator_call(function, [cuts], signature, [tuple(value.shape)])
    owners = next(_assignments(asked.parts, grid.sizes))
    return redistribute(_dtensor(value, grid), _layout(indices, owners), grid, link, name)


def _dtensor(value: Tensor, grid: RankGrid) -> DTensor:
    if isinstance(value, DTensor):
        if value.device_mesh != grid.mesh:
            raise ValueError(f"shard: a DTensor on {value.device_mesh}; operators run on {grid.mesh}")
        return value
    return DTensor.from_local(value, grid.mesh, [Replicate() for _ in grid.sizes], run_check=False)


# ---- running it ----


def _run(
    function: Any, strategy: Strategy, link: Link, args: tuple[Any, ...], named: dict[str, Any]
) -> DTensor:
    grid = grid_of(dist.group.WORLD)
    tensors = [_dtensor(arg, grid) for arg in args if isinstance(arg, Tensor)]
    others = [arg for arg in args if not isinstance(arg, Tensor)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    asked = _operator_call(function, strategy, rule_of(function)(*shapes, *others, **named), shapes)
    owners = _cheapest(asked, tensors, grid, link)
    came = [
        redistribute(tensor, _layout(indices, owners), grid, link, f"{asked.name}, input {number}")
        for number, (tensor, indices) in enumerate(zip(tensors, asked.signature.inputs, strict=True))
    ]
    locals_ = [
        tensor.to_local(grad_placements=_share(indices, owners))
        for tensor, indices in zip(came, asked.signature.inputs, strict=True)
    ]
    local = asked.signature.local(_MeshPosition(grid, owners), *locals_)
    output = _share(asked.signature.output, owners)
    return _out(local, grid, output)


def _share(indices: Sequence[str | None], owners: Owners) -> Layout:
    """The layout of a rank's contribution: a partial sum over the axes of an index that it does not have."""
    return tuple(
        Replicate() if owner is None else Shard(indices.index(owner)) if owner in indices else Partial()
        for owner in owners
    )


def _cheapest(asked: _OperatorCall, tensors: Sequence[DTensor], grid: RankGrid, link: Link) -> Owners:
    def price(owners: Owners) -> float:
        return sum(
            transform_path(
                tuple(tensor.placements), _layout(indices, owners), tuple(tensor.shape),
                tensor.element_size(),
                grid.sizes, link,
            ).seconds
            for tensor, indices in zip(tensors, asked.signature.inputs, strict=True)
        )  # fmt: skip

    return min(_assignments(asked.parts, grid.sizes), key=price)


def _out(local: Tensor, grid: RankGrid, layout: Layout) -> DTensor:
    shape = list(local.shape)
    for placement, size in zip(layout, grid.sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    whole_shape = torch.Size(shape)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local.contiguous(), grid.mesh, layout, run_check=False, shape=whole_shape, stride=stride
    )


class _MeshPosition:
    """See `operators.IndexPosition`."""

    def __init__(self, grid: RankGrid, owners: Owners) -> None:
        self._grid, self._owners = grid, owners

    def _axes(self, index: str) -> tuple[int, ...]:
        return tuple(axis for axis, owner in enumerate(self._owners) if owner == index)

    def parts(self, index: str) -> int:
        return self._grid.ranks(self._axes(index))

    def place(self, index: str) -> int:
        return self._grid.place(self._axes(index))

    def total(self, value: Tensor, index: str) -> Tensor:
        axes = self._axes(index)
        result: Tensor = _SumOverRanks.apply(value, self._grid.group(axes)) if axes else value
        return result

    def largest(self, value: Tensor, index: str) -> Tensor:
        axes = self._axes(index)
        if axes:
            value = value.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(value, dist.ReduceOp.MAX, self._grid.group(axes))
        return value


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; each rank's use of it adds to the gradient of every contribution."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
