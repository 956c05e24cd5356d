"""Private names that `unisono.parallel.graph` uses: tensors with shapes and without values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as OperatorMode

from . import profiler
from .probe import PrivateName, find, need, optional

__all__ = [
    "NAMES", "READ", "OperatorMode", "address_of", "arguments_of", "fake_mode", "is_about_data", "is_fake",
    "memory_of", "number_read", "within_modes", "without_values",
]  # fmt: skip

READ = 0.5  # what is read of floats: NAdam divides by 1 less what it reads

NAMES = {
    "mode": PrivateName(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        purpose="run a model on shapes, without values",
        without="up.capture cannot run, nor a plan that records the model",
    ),
    "value": PrivateName(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        purpose="tell a model that reads values from one that raises",
        without="the error of such a model does not say so",
    ),
    "shape": PrivateName(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        purpose="tell a model whose shapes depend on values from one that raises",
        without="the error of such a model does not say so",
    ),
}


NAMES["tensor"] = PrivateName(
    "torch._subclasses.fake_tensor:FakeTensor",
    purpose="copy a model without values; leave out messages where a model is recorded, not run",
    without="up.capture cannot run, nor a plan that records the model",
)
NAMES["groups"] = PrivateName(
    "torch:ops.aten._grouped_mm",
    purpose="give a product of groups its shape in every type: PyTorch 2.12 and 2.13 know it of bf16 only",
    without="a model that multiplies groups is recorded in those types only whose shapes PyTorch knows",
)
NAMES["function modes"] = PrivateName(
    "torch.overrides:_get_current_function_mode_stack",
    purpose="likewise, its modes of functions",
    without="a TorchFunctionMode around up.Pipe is not called",
)
NAMES["saved tensors"] = PrivateName(
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    purpose="likewise, its saved_tensors_hooks",
    without="save_on_cpu around up.Pipe keeps tensors where they are",
)


def within_modes() -> bool:
    """Whether this thread has modes, but for a default device, or hooks of saved tensors: no other has."""
    count, functions, saved = (
        optional(name) for name in (profiler.MODES, NAMES["function modes"], NAMES["saved tensors"])
    )
    others = [mode for mode in functions() if not isinstance(mode, DeviceContext)] if functions else []
    return bool(others or (count and count()) or (saved and saved(True) is not None))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values, because a model is recorded."""
    kind = find(NAMES["tensor"])
    return kind is not None and isinstance(tensor, kind)


def without_values(mode: Any, value: Tensor, device: torch.device) -> Tensor:
    """A tensor of a mode like `value`, without its values. A parameter stays one.

    What PyTorch's own ways do, `empty_strided` under the mode and `nn.Parameter`, without their five
    dispatches: a model has thousands of tensors.
    """
    with torch.no_grad():
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        made: Tensor = need(NAMES["tensor"])(mode, memory, device)
    if isinstance(value, torch.nn.Parameter):
        made.requires_grad_(value.requires_grad)
        made._is_param = True
        if not isinstance(made, torch.nn.Parameter):  # this PyTorch tells parameters by something else
            return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made


def fake_mode() -> Any:
    """Make a mode under which every new tensor has a shape and no values."""
    kind = need(NAMES["mode"])
    return (kind if _knows_groups() else _with_groups(kind))(allow_non_fake_inputs=True)


@functools.cache
def _knows_groups() -> bool:
    """Whether PyTorch knows the shape of a product of groups in f32, which its kernels compute."""
    multiply = find(NAMES["groups"])
    if multiply is None:
        return True
    rows, stacked = torch.empty(4, 16, device="meta"), torch.empty(2, 16, 16, device="meta")
    try:
        multiply(rows, stacked, torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


@functools.cache
def _with_groups(kind: Any) -> Any:
    """The mode `kind`, which also knows the shape of a product of groups. Its run checks the arguments."""
    multiply = find(NAMES["groups"]).default

    def dispatch(mode: Any, op: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        if op is not multiply:
            return kind.__torch_dispatch__(mode, op, types, args, named or {})
        with mode:
            return args[0].new_empty(_shape_of_groups(*args[:3]))

    return type("ShapesWithGroups", (kind,), {"__torch_dispatch__": dispatch})


def _shape_of_groups(rows: Tensor, stacked: Tensor, offs: Tensor | None = None) -> tuple[int, ...]:
    """The shape of aten._grouped_mm.

    Shapes: rows [n, k] or [groups, n, k]; stacked [k, m] or [groups, k, m]; offs [groups], where one has 2
    dimensions.
    Example: rows [n, k], stacked [groups, k, m] -> [n, m]; rows [n, k], stacked [k, m] -> [groups, n, m].
    """
    grouped = rows.dim() == stacked.dim()
    groups = () if not grouped else (rows.shape[0] if offs is None else offs.shape[0],)
    return (*groups, rows.shape[-2], stacked.shape[-1])


def arguments_of(op: Any) -> Any:
    """The arguments of an operator, with what it writes into."""
    return op._schema.arguments


def number_read(op: Any, args: Any, number: float = READ) -> float | None:
    """What an operator reads of a tensor without values: 1, or `number`; None: it reads no number."""
    if op.name() != "aten::_local_scalar_dense":
        return None
    return {torch.bool: True}.get(args[0].dtype, number if args[0].is_floating_point() else 1)


def memory_of(tensor: Tensor) -> tuple[Any, int]:
    """The storage of a tensor, and a number that is equal for tensors that share it."""
    storage: Any = tensor.untyped_storage()
    return storage, address_of(storage)


def address_of(storage: Any) -> int:
    """A number of a storage, which no other one has while it lives."""
    return storage._cdata  # type: ignore[no-any-return]


def is_about_data(error: BaseException) -> bool:
    """Whether a model raised this because it reads the values of a tensor, which are not there."""
    kinds = tuple(kind for name in ("value", "shape") if (kind := find(NAMES[name])) is not None)
    return isinstance(error, kinds)
