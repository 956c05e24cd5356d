"""Random numbers in a parameter of which this rank has a part, or nothing: those of one process.

PyTorch draws for the part that a rank has. With one seed on all ranks, as one process has it, the parts would
get equal numbers. Here each rank draws for the whole tensor and takes its part.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import init

from .dtensor import operator_handlers

DRAWS = (
    "bernoulli", "bernoulli_.float", "bernoulli_.Tensor", "bernoulli.p", "cauchy_", "exponential_",
    "geometric_", "log_normal_", "native_dropout", "normal_", "normal.Tensor_float", "normal.Tensor_Tensor",
    "rand_like", "randint_like", "randint_like.low_dtype", "randn_like", "random_", "random_.from",
    "random_.to", "uniform_",
)  # fmt: skip
READS = (
    "bernoulli",
    "bernoulli_.Tensor",
    "bernoulli.p",
    "native_dropout",
    "normal.Tensor_float",
    "normal.Tensor_Tensor",
)
OF_INIT = (
    "kaiming_normal_",
    "kaiming_uniform_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "xavier_normal_",
    "xavier_uniform_",
)
SKIP_META = ("no_grad_trunc_normal_", "orthogonal_", "sparse_", "trunc_normal_")
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
BY_NAME = frozenset([name.partition(".")[0] for name in DRAWS] + [*OF_INIT, "dropout"])

_meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # of the parameters for which this is done


def draw_whole(parameters: Iterable[Tensor]) -> None:
    """Draw for DTensors on the meshes of these as one process does, from now on."""
    _meshes.update(value.device_mesh for value in parameters if isinstance(value, DTensor))
    handlers = operator_handlers()
    if not _meshes or handlers is None:
        return
    for operator in map(_operator, DRAWS):
        if operator is not None and handlers.get(operator) is not _draw:
            _before[operator] = handlers.get(operator)
            handlers[operator] = _draw


class StandIn(nn.Parameter):
    """A parameter on the meta device for one that another rank has: what is drawn into it is drawn here, too.

    So the numbers that follow are those of one process.

    Attributes:
        drawn_on: the device of the other parameter.
    """

    drawn_on = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw for a tensor with memory, and forget it."""
        named = kwargs or {}
        if getattr(func, "__name__", "") in BY_NAME:
            func(*map(_with_memory, args), **{name: _with_memory(value) for name, value in named.items()})
        elif func == _IS_META:  # torch.nn.init asks it, and returns without drawing
            caller = sys._getframe(1)
            code = caller.f_code
            if caller.f_globals.get("__name__") == init.__name__ and code.co_name.lstrip("_") in SKIP_META:
                given = {name: caller.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
                caller.f_globals[code.co_name](**{k: _with_memory(value) for k, value in given.items()})
        try:
            return Tensor.__torch_function__.__func__(cls, func, types, args, named)  # type: ignore[attr-defined]
        except (RuntimeError, TypeError) as error:
            if not any(isinstance(one, Tensor) and not one.is_meta for one in _flat((args, named))):
                raise
            name = getattr(func, "__name__", func)
            raise RuntimeError(
                f"{name} takes a parameter that another stage of the pipeline has together with values, as "
                "parameters_to_vector and vector_to_parameters do. Go parameter by parameter: with "
                "torch.no_grad(): p.mul_(0.5); run.state_dict() has all values"
            ) from error


_before: dict[Any, Callable[..., Any] | None] = {}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default", None)


def _draw(operator: Any, args: Any, named: Any) -> Any:
    cut = next((one for one in args if isinstance(one, DTensor)), None)
    partial = cut is None or any(
        not (one.is_shard() or one.is_replicate() or _strided(one)) for one in cut.placements
    )
    if cut is None or partial or cut.device_mesh not in _meshes:
        return _as_before(operator, args, named)
    reads = operator in map(_operator, READS)
    made = operator(*(_whole(one, reads=reads) if isinstance(one, DTensor) else one for one in args), **named)
    if operator._schema.is_mutable:
        cut._local_tensor.copy_(_part(made, cut))
        return cut
    several = isinstance(made, tuple)
    found = [_as_cut(one, cut) for one in (made if several else (made,))]
    return tuple(found) if several else found[0]


def _as_before(operator: Any, args: Any, named: Any) -> Any:
    """What PyTorch does by itself."""
    handlers = operator_handlers()
    if (before := _before[operator]) is not None:
        return before(operator, args, named)
    del handlers[operator]
    try:
        return operator(*args, **named)
    finally:
        handlers[operator] = _draw


def _strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _whole(value: Any, *, reads: bool) -> Tensor:
    """A tensor of the whole shape. reads: with this rank's values in its part."""
    inner = value._local_tensor
    whole = torch.zeros(value.shape, dtype=value.dtype, device=inner.device)
    if reads:
        places = torch.arange(whole.numel(), device=inner.device).view(whole.shape)
        whole.view(-1)[_part(places, value)] = inner
    return whole


def _part(whole: Tensor, like: Any) -> Tensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)._local_tensor


def _as_cut(whole: Tensor, like: Any) -> Any:
    return DTensor.from_local(
        _part(whole, like),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _flat(value: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts."""
    if isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _flat(one)
    else:
        yield value


def _with_memory(value: Any) -> Any:
    if not isinstance(value, StandIn):
        return value
    return torch.zeros(tuple(value.shape), dtype=value.dtype, device=StandIn.drawn_on)
