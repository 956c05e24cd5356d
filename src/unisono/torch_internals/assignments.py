"""Writes that a DTensor loses in silence.

`p.data = t` changes the wrapper, not what it wraps. `p[0]` along a dimension that is cut is a copy: what is
written there is lost. `p[index] = t` raises; here each rank writes the whole and takes its part.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from .dtensor import operator_handlers
from .probe import PrivateName, find

NAMES = {
    "wrapped": PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor",
        purpose="refuse p.data = t of a parameter that is cut or sharded",
        without="it has no effect, and raises no error",
    ),
}
VIEWS = (
    "diagonal", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes",
    "squeeze", "squeeze.dim", "t", "transpose.int", "unbind.int", "unsqueeze", "view",
)  # fmt: skip
INDEXED = (
    "index_add_", "index_copy_", "index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_put_",
    "masked_scatter_", "scatter_.src", "scatter_.value",
)  # fmt: skip
REMEDY = (
    "Write what this plan keeps: p.mul_(mask) with a mask of p's kind, p[index] = t with a tensor index, or "
    "p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))"
)
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # the WrappedTensors of all runs


def version_of(tensor: Any) -> int:
    """How often the values of a tensor, or what it wraps, were written in place."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return 0 if inner.is_inference() else int(inner._version)


class WrappedTensors:
    """The memory of DTensors as it was: of each wrapper, and of what it wraps."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        known = find(NAMES["wrapped"]) is not None
        cut: list[tuple[str, Any]] = [pair for pair in named if known and isinstance(pair[1], DTensor)]
        self._marks = [_mark(name, value) for name, value in cut]
        _known.add(self)
        _handle(
            {
                **dict.fromkeys(VIEWS, _view),
                **dict.fromkeys(INDEXED, _write_whole),
                "t_": _refuse_turned,
                "fill_.Tensor": _fill,
            }
        )

    def name_of(self, inner: Tensor) -> str | None:
        """The name of the one whose memory, or a part of it, `inner` has."""
        storage = inner.untyped_storage()
        return next((mark[0] for mark in self._marks if mark[4] is storage), None)

    def assigned(self) -> str | None:
        """The name of one that has other memory now; None: none has.

        Module.to swaps wrapper and wrapped together: then the values are the same.
        """
        for number, (name, value, wrapper, inner, storage) in enumerate(self._marks):
            now = getattr(value, "_local_tensor", None)
            if now is inner and value.untyped_storage() is wrapper:
                continue
            if now is None or now is inner or now.untyped_storage() is not storage:
                return name
            self._marks[number] = _mark(name, value)
        return None


def _mark(name: str, value: Any) -> tuple[str, Any, Any, Any, Any]:
    inner = value._local_tensor
    return name, value, value.untyped_storage(), inner, inner.untyped_storage()


# ---- handlers of operators ----


def _handle(chosen: dict[str, Any]) -> None:
    handlers = operator_handlers()
    for name, handler in chosen.items() if _known and handlers is not None else ():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            handlers.setdefault(operator, handler)


def _plainly(operator: Any, args: Any, named: Any) -> Any:
    """Call an operator as PyTorch does without its handler."""
    handlers = operator_handlers()
    own = handlers.pop(operator)
    try:
        return operator(*args, **named)
    finally:
        handlers[operator] = own


def _name_of(value: Any) -> str | None:
    """The name of the parameter that a DTensor is, or is a view of."""
    found = (known.name_of(value._local_tensor) for known in _known)
    return next((name for name in found if name is not None), None)


def _view(operator: Any, args: Any, named: Any) -> Any:
    """Mark a view of a parameter that is a copy, and guard it."""
    given = args[0]
    if not isinstance(given, DTensor):
        return _plainly(operator, args, named)
    inner: Any = given._local_tensor
    name = getattr(inner, "copy_of", None) or _name_of(given)
    try:
        made = _plainly(operator, args, named)
    except RuntimeError as error:
        if name is None:
            raise
        raise RuntimeError(
            f'{operator.name()} cannot run on the parameter "{name}", which is cut over ranks: {error}. What '
            "joins parameters, as parameters_to_vector does, needs all of each: p.full_tensor() on all "
            f"ranks. {REMEDY}"
        ) from error
    for one in () if name is None else made if isinstance(made, (list, tuple)) else (made,):
        if one._local_tensor.untyped_storage() is not inner.untyped_storage() or hasattr(inner, "copy_of"):
            one._local_tensor.copy_of = name
            _guard()
    return made


def _guard() -> None:
    """From the first copy on: optimizers whose steps make none pay nothing."""
    if not _guarded:
        found = [name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")]
        packets = {name: getattr(torch.ops.aten, name, None) for name in found}
        _guarded.update(
            f"{name}.{each}" for name, packet in packets.items() if packet for each in packet.overloads()
        )
        _handle(dict.fromkeys(_guarded, _written))


_guarded: set[str] = set()


def _written(operator: Any, args: Any, named: Any) -> Any:
    name = getattr(getattr(args[0], "_local_tensor", None), "copy_of", None)
    if name is not None:
        raise RuntimeError(
            f'the parameter "{name}" is cut, and this part of it is a copy: {operator} would write '
            f"what is lost. {REMEDY}"
        )
    return _plainly(operator, args, named)


def _fill(operator: Any, args: Any, named: Any) -> Any:
    """`p[:] = 1.0`, which some versions of PyTorch do not have for DTensors."""
    cut, value = args
    copied = getattr(getattr(cut, "_local_tensor", None), "copy_of", None) is not None
    plain = isinstance(cut, DTensor) and not isinstance(value, DTensor) and not value.dim()
    if copied or not plain or any(one.is_partial() for one in cut.placements):
        return _written(operator, args, named)
    cut._local_tensor.fill_(value)
    return cut


def _write_whole(operator: Any, args: Any, named: Any) -> Any:
    """Write into the whole parameter, and take this rank's part. All ranks run this."""
    cut = args[0]
    if getattr(getattr(cut, "_local_tensor", None), "copy_of", None) is not None:
        return _written(operator, args, named)
    if not isinstance(cut, DTensor) or _name_of(cut) is None:
        return _plainly(operator, args, named)
    whole = torch.utils._pytree.tree_map(_whole, (args, named))
    made = operator(*whole[0], **whole[1])
    part = distribute_tensor(made, cut.device_mesh, cut.placements, src_data_rank=None)
    cut._local_tensor.copy_(part._local_tensor)
    return cut


def _whole(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def _refuse_turned(operator: Any, args: Any, named: Any) -> Any:
    if any(
        getattr(mark[1], "device_mesh", None) == args[0].device_mesh for one in _known for mark in one._marks
    ):
        raise RuntimeError(
            "t_() turns a tensor that is cut over ranks in place, as init.orthogonal_ does, which "
            f"PyTorch cannot. {REMEDY}"
        )
    return _plainly(operator, args, named)
