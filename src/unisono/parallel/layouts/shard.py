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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from unisono.errors import UnfitError
from unisono.parallel.batches import fingerprint
from unisono.parallel.gradients import span
from unisono.parallel.graph.noted_call import GATHERED, PartsOp, WholeOp, noted_call
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals import c10d
from unisono.torch_internals.autograd import in_backward
from unisono.torch_internals.fake import is_fake

from .operators import IndexPosition, Indices, OperatorSignature, Owners, rule_of
from .redistribute import (
    NAME,
    SUM,
    WHOLE,
    Layout,
    OperatorRanks,
    placed,
    primes,
    ranks_of_group,
)

Strategy = Sequence[Sequence[int]]


def shard(op: Any, strategy: Strategy, *, group: Any = None) -> Any:
    """Cut `op` by `strategy`.

    In a model that `parallelize` runs, the ranks of the plan's tensor axis share the operator.

    Args:
        op: a function of torch (see `operators.RULES`), or an nn.Linear, nn.Embedding or nn.LayerNorm.
        strategy: for each input tensor, for each of its dims, the number of parts. For a module the first
            entry is for its input; then come its parameters.
        group: the ranks that share the operator outside a plan, which alone call it; None: all.
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
        return Sharded(op, strategy, group=group)
    rule_of(op)
    return ShardedCall(op.__name__, op, strategy, group)


def whole(value: Tensor) -> Tensor:
    """Return a DTensor's value as a plain tensor, whole on every rank that shares it; differentiable."""
    return noted_call(WHOLE_OP, (value,), lambda: whole_value(value))  # type: ignore[no-any-return]


def whole_value(value: Tensor) -> Tensor:
    """The same; no operator of a recorded program."""
    if not isinstance(value, DTensor):
        return value
    ranks = getattr(value.device_mesh, NAME, None)
    if ranks is None:  # a mesh of others
        return value.full_tensor()
    found: Tensor = ranks.moved(_known(value, ranks), ranks.whole, ranks.whole, "whole")
    return found


WHOLE_OP = WholeOp(GATHERED, whole_value)


class Sharded(nn.Module):
    """A module with cut parameters, whose operator runs on the parts."""

    def __init__(self, module: nn.Module, strategy: Strategy, *, group: Any = None) -> None:
        super().__init__()
        name, parameters = type(module).__name__, dict(module.named_parameters(recurse=False))
        function, named = _function_of(module)
        self._call, self._named = ShardedCall(name, function, strategy, group), named
        if len(strategy) != 1 + len(parameters):
            raise ValueError(
                f"{name}: the strategy has {len(strategy)} entries, its input and parameters "
                f"({', '.join(parameters)}) are {1 + len(parameters)}"
            )
        for (path, parameter), cuts in zip(parameters.items(), strategy[1:], strict=True):
            value = ShardedCall(f"{name}.{path}", torch.clone, [cuts], group)(parameter.detach())
            self.register_parameter(path, nn.Parameter(value, requires_grad=parameter.requires_grad))

    def forward(self, x: Tensor) -> DTensor:
        result: DTensor = self._call(x, *self.parameters(), **self._named)
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


# ---- in a plan ----


@contextlib.contextmanager
def planned(plan: Any, mesh: Any = None) -> Iterator[None]:
    """A plan runs a model meanwhile. mesh: a PlanMesh; None: models are only recorded."""
    before = _plan.set((plan, None if mesh is None else mesh.group("tensor")))
    try:
        yield
    finally:
        _plan.reset(before)


_plan: ContextVar[tuple[Any, Any]] = ContextVar("plan", default=(None, None))


# ---- a call ----


class _CallState:
    """What changes in a sharded operator, and is no setting of the model that has it."""

    __slots__ = ("compared", "plan")

    def __init__(self) -> None:
        self.compared, self.plan = False, _plan.get()


class ShardedCall:
    """One sharded operator. Its first call compares the plain inputs of all ranks."""

    def __init__(self, name: str, function: Any, strategy: Strategy, group: Any = None) -> None:
        self._name, self._function, self._group = name, function, group
        self._strategy, self._state = tuple(map(tuple, strategy)), _CallState()

    def __deepcopy__(self, _memo: Any) -> ShardedCall:  # groups have no copy
        return ShardedCall(self._name, self._function, self._strategy, self._group)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """A DTensor; while a plan records the program of a model, the whole value."""
        for key, value in named.items():
            if isinstance(value, Tensor):
                raise ValueError(f"shard({self._name}): give tensors by position, not {key}=")
        while args and args[-1] is None:  # a bias that a layer does not have
            args = args[:-1]
        (plan, _), run = self._plan, functools.partial(self._run, **named)
        if plan is not None and (self._group is not None or plan.context > 1):
            raise UnfitError(
                f"shard({self._name}) within a model under {plan}: the ranks of the tensor axis "
                "share the operator, of whole sequences. Leave out group= and context="
            )
        told = f"unisono.shard({self._name}, {self._strategy}, {named})"
        return noted_call(PartsOp(told, run, lambda: self._recorded(args, named)), args, lambda: run(*args))

    @property
    def _plan(self) -> tuple[Any, Any]:
        """The plan that runs the model, and the group of its tensor axis, if there are values."""
        if not in_backward():  # which recomputes in a thread of its own
            self._state.plan = _plan.get()
        return self._state.plan

    def _run(self, *args: Any, **named: Any) -> Tensor:
        plan, group = self._plan
        if plan is not None and group is None:
            return self._recorded(args, named)[0]
        ranks = ranks_of_group(group := group or self._group or c10d.world()[0])
        tensors = [_known(arg, ranks) for arg in args if isinstance(arg, Tensor)]
        self._compare(tensors, group)
        signature, sizes, owners = self._planned(plan, tensors, args, named, ranks.axes, ranks.layout)
        locals_ = []
        for number, (tensor, indices) in enumerate(zip(tensors, signature.inputs, strict=True)):
            goal, contributed = _layout(indices, owners), _layout(indices, owners, elsewhere=SUM)
            locals_.append(ranks.moved(tensor, goal, contributed, f"{self._name}, input {number}"))
        local = signature.local(IndexPosition(self._name, sizes, owners, ranks), *locals_)
        shape = [sizes.get(i, size) for i, size in zip(signature.output, local.shape, strict=True)]
        mesh = ranks.mesh(tensors[0].device.type)
        return placed(local, mesh, _layout(signature.output, owners, elsewhere=SUM), shape)

    def _recorded(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Tensor, int]:
        """The whole value, and how many floating-point operations it takes."""
        plan, _ = self._plan
        if plan is None:
            raise UnfitError(
                f"shard({self._name}): which ranks share it, the plan says, and there is none here. Write "
                "parallelize(model, up.Plan(tensor=...), ...)"
            )
        axes, tensors = primes(plan.tensor), [arg for arg in args if isinstance(arg, Tensor)]
        layout = (WHOLE,) * len(axes)
        signature, sizes, _ = self._planned(plan, tensors, args, named, axes, lambda _: layout)
        multiplies = len(tensors) > 1 and not set(signature.output).issuperset(sizes)
        value = signature.local(IndexPosition(self._name, sizes), *tensors)
        return value, math.prod(sizes.values()) * (1 + multiplies)

    def _planned(
        self, plan: Any, tensors: Sequence[Tensor], args: Any, named: Any, axes: Any, layout: Any
    ) -> tuple[OperatorSignature, dict[str | None, int], Owners]:
        lies = tuple((tuple(each.shape), each.element_size(), layout(each)) for each in tensors)
        others = _hashable(arg for arg in args if not isinstance(arg, Tensor))
        named, have = (
            tuple(zip(named, _hashable(named.values()), strict=True)),
            f"there are {math.prod(axes)}",
        )
        if plan is not None:
            have = f"the tensor axis of {plan} has {math.prod(axes)}: write tensor="
        return _call_plan(self._name, self._function, self._strategy, axes, have, lies, others, named)

    def _compare(self, tensors: Sequence[Tensor], group: Any) -> None:
        """Raise ValueError, on all ranks, where plain inputs of the first call differ."""
        plain = [each for each in tensors if not isinstance(each, DTensor)]
        if self._state.compared or any(one.is_meta or is_fake(one) for one in plain):
            return
        self._state.compared = True
        # of copies: memory that NumPy has seen is not freed by fully_shard
        marks = on_every_rank(lambda: fingerprint([one.detach().clone() for one in plain]), group)
        if (other := next((rank for rank, mark in enumerate(marks) if mark != marks[0]), 0)) > 0:
            raise ValueError(
                f"shard({self._name}): plain tensors count as replicated, and those of rank {other} have "
                "other shapes, types or values than those of rank 0. Give all ranks the same, such as "
                "parameters made from one seed and the whole batch"
            )


def _hashable(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)


@functools.lru_cache(maxsize=4096)
def _call_plan(
    name: str, function: Any, strategy: Strategy, axes: Any, have: str, lies: Any, others: Any, named: Any
) -> tuple[OperatorSignature, dict[str | None, int], Owners]:
    """The signature of a call, the sizes of its indices, and which mesh axes cut them.

    Args:
        axes: sizes of the mesh.
        have: how many ranks that is, in words.
        lies: shape, bytes of an element, and layout of each input.
    """
    shapes = [shape for shape, *_ in lies]
    try:
        signature = rule_of(function)(*shapes, *others, **dict(named))
    except TypeError as error:
        raise TypeError(f"shard({name}): {error}. Give tensors by position, and settings by name") from error
    parts = _parts(name, strategy, signature, shapes)
    cut = [str(count) for count in parts.values() if count > 1]
    ranks, needed = math.prod(axes), math.prod(parts.values())
    product = f"{' x '.join(cut)} = {needed}" if len(cut) > 1 else str(needed)
    if needed > ranks:
        raise UnfitError(f"{name}: the strategy needs {product} ranks, {have}")
    if ranks % needed:
        raise UnfitError(f"{name}: the strategy's {product} parts do not divide {ranks} ranks")
    owners = _nearest(parts, signature.inputs, lies, axes)
    inputs = [*zip(signature.inputs, shapes, strict=True)]
    sizes = {index: size for indices, shape in inputs for index, size in zip(indices, shape, strict=True)}
    return signature, sizes | signature.leads, owners


def _known(value: Tensor, ranks: OperatorRanks) -> Tensor:
    """A plain tensor, or a DTensor on the mesh. What DTensor's operators have left as a mean, DTensor makes
    whole.
    """
    if not isinstance(value, DTensor):
        return value
    mesh = ranks.mesh(value.device.type)
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
    return {index: cut for index, (cut, *_) in found.items()}


def _smallest(size: int, cut: int) -> int:
    axes = primes(cut)
    places = itertools.product(*map(range, axes))
    return min(span(size, [*zip(axes, place, strict=True)])[1] for place in places)


def _nearest(parts: dict[str, int], inputs: Sequence[Indices], lies: Any, axes: Sequence[int]) -> Owners:
    """The mesh axes of each index, as many as its parts, with which most bytes stay where they are."""
    cut = {index: count for index, count in parts.items() if count > 1}

    def fits(owners: Owners) -> bool:
        sizes = [*zip(owners, axes, strict=True)]
        return all(count == math.prod(n for own, n in sizes if own == index) for index, count in cut.items())

    def stays(owners: Owners) -> int:
        return sum(
            math.prod(shape) * itemsize
            for (shape, itemsize, layout), indices in zip(lies, inputs, strict=True)
            for start, goal in zip(layout, _layout(indices, owners), strict=True)
            if start in (goal, WHOLE)
        )

    return max(filter(fits, itertools.product([*cut, None], repeat=len(axes))), key=stays)


@functools.lru_cache(maxsize=4096)
def _layout(indices: Indices, owners: Owners, elsewhere: Any = WHOLE) -> Layout:
    """Where these indices lie. `elsewhere`: the placement on an axis that cuts an index which they have not:
    SUM for what a rank contributes, since the others contribute the rest.
    """
    return tuple(
        WHOLE if owner is None else Shard(indices.index(owner)) if owner in indices else elsewhere
        for owner in owners
    )
