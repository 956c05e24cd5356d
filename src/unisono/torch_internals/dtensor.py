"""What PyTorch's DTensors do otherwise than the tensors of one process, mended by handlers of operators.

A number that is read from a partial sum (`.item()`, `float()`, `if`) would be that of one rank. Lists that
mix DTensors of several meshes, or DTensors and tensors, would be refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .probe import PrivateName, find, need

__all__ = [
    "all_to_all", "finding_shapes_within", "handle_parts", "of_part", "operator_handlers", "part_of",
    "put_part", "reading_together",
]  # fmt: skip

NAMES = {
    "handlers": PrivateName(
        "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
        purpose="read whole numbers from partial sums, take lists of cut and whole parameters, draw random "
        "numbers into one as one process does, refuse writes into a copy of its part, write p[index] = t",
        without="an optimizer that reads numbers from cut parameters steps by those of one rank; parts of a "
        "parameter draw equal numbers; p[0].zero_() of a cut one has no effect; lists of cut and whole "
        "parameters, and p[index] = t, raise an error of PyTorch",
    ),
    "number": PrivateName(
        "torch:ops.aten._local_scalar_dense.default",
        purpose="the operator that reads a number",
        without="an optimizer that reads numbers from cut parameters steps by those of one rank",
    ),
    "all_to_all": PrivateName(
        "torch.distributed._functional_collectives:all_to_all_single",
        purpose="cut a value along another dim by the kind of collective that DTensor uses",
        without="up.shard cannot cut a value along another dim",
    ),
}
NAMES["shapes"] = PrivateName(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._fake_mode_lock",
    purpose="tell operators that find the shape of a DTensor's result from those of a step",
    without="up.plan says too much memory for plans that cut parameters",
)
LISTS = ("_foreach_", "_fused_")  # operators on lists, whose every place is computed by itself
_together: ContextVar[bool] = ContextVar("together", default=False)


@contextlib.contextmanager
def reading_together() -> Iterator[None]:
    """All ranks run the same code meanwhile: a number that is read from a partial sum is the whole one."""
    before = _together.set(True)
    try:
        yield
    finally:
        _together.reset(before)


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """Send part i of a tensor, along its first dim, to rank i; return the parts from all ranks."""
    received: Tensor = need(NAMES["all_to_all"])(parts, None, None, group)
    return received


@contextlib.contextmanager
def finding_shapes_within(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """PyTorch finds shapes of DTensors within `context` meanwhile, by operators on whole tensors."""
    owner, _, name = NAMES["shapes"].path.rpartition(".")
    kind, before = find(NAMES["shapes"]._replace(path=owner)), find(NAMES["shapes"])
    if before is not None:
        setattr(kind, name, context)
    try:
        yield
    finally:
        if before is not None:
            setattr(kind, name, before)


def part_of(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor wraps, on no graph; another tensor itself."""
    held: Any = tensor
    found: Tensor = held._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def of_part(part: Tensor, like: Tensor) -> Tensor:
    """A DTensor that is cut as `like` is, with its part in any memory; the part, where that is none."""
    held: Any = like
    made: Any = DTensor
    wrapped: Tensor = made(part, held._spec, requires_grad=False) if isinstance(like, DTensor) else part
    return wrapped


def put_part(tensor: Tensor, part: Tensor) -> None:
    """Have another part in a DTensor, or other memory in another tensor."""
    held: Any = tensor
    if isinstance(tensor, DTensor):
        held._local_tensor = part
    else:
        held.data = part


def operator_handlers() -> Any:
    """Return PyTorch's table operator -> handler for DTensors, to write into; None: this version has none."""
    return find(NAMES["handlers"])


def handle_parts() -> None:
    """Handle DTensors so from now on, in the whole process."""
    handlers = operator_handlers()
    number = find(NAMES["number"])
    if handlers is None or number is None or number in handlers:
        return
    handlers[number] = _number
    aten = torch.ops.aten
    for name in dir(torch):
        packet = getattr(aten, name, None) if name.startswith(LISTS) else None
        for overload in () if packet is None else packet.overloads():
            handlers.setdefault(getattr(packet, overload), _each_kind)


def _number(op: Any, args: Any, _named: Any) -> Any:
    """The number in a DTensor."""
    value = args[0]
    if not all(placement.is_replicate() for placement in value.placements):
        if not _together.get():
            raise RuntimeError(
                f"a number is read from a tensor that is {list(value.placements)} over ranks: this rank has "
                "a part of it. Call .full_tensor() on all ranks first: p.norm().full_tensor().item()"
            )
        return op(value.full_tensor())
    return op(value.to_local())


def _each_kind(op: Any, args: Any, named: Any) -> Any:
    """An operator on lists, once for the places of each mesh, and once for those of plain tensors."""
    given = [*args, *named.values()]
    lists = [one for one in given if _is_list(one)]
    count = max(map(len, lists), default=0)
    kinds: dict[Any, list[int]] = {}
    for place in range(count):
        cut = (one[place] for one in lists if len(one) == count)
        mesh = next((each.device_mesh for each in cut if isinstance(each, DTensor)), None)
        kinds.setdefault(mesh, []).append(place)
    if len(kinds) < 2:
        return _plainly(op, args, named)
    results: list[Any] = [None] * count
    for places in kinds.values():

        def some(value: Any, places: Sequence[int] = places) -> Any:
            whole = not isinstance(value, (list, tuple)) or len(value) != count
            return value if whole else [value[place] for place in places]

        found = _plainly(op, [*map(some, args)], {key: some(value) for key, value in named.items()})
        for place, value in zip(places, found or (), strict=bool(found)):
            results[place] = value
    if any(one is None for one in results):
        return None
    norms = all(one.dim() == 0 for one in results) and any(one.dim() for one in lists[0])
    return [one.full_tensor() if norms and isinstance(one, DTensor) else one for one in results]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Tensor)


def _plainly(op: Any, args: Any, named: Any) -> Any:
    """Call an operator as PyTorch does without this handler."""
    handlers = operator_handlers()
    own = handlers.pop(op)
    try:
        return op(*args, **named)
    finally:
        handlers[op] = own
