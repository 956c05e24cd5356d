"""Translates PyTorch's arguments into the Group's: tensors, options, reduce operations, dtypes.

A `TensorArguments` collects the buffers of one collective. A contiguous CPU tensor goes to the Group
unchanged. Another layout is copied before the call, and the result is copied back after it. Wrong arguments
are a ValueError or a TypeError here, before a byte moves.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import unisono as un
from unisono.engine.memory.buffers import refuse_wrapper
from unisono.errors import message
from unisono.torch_internals import version_names
from unisono.torch_internals.c10d import ReduceOp

from . import profiling
from .memory import share_memory, surely_apart
from .nccl_substitute import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Options = TypeVar("Options")

# By PyTorch's number, which is the hash of its ReduceOp. PREMUL_SUM has a factor: see `reduce_op`.
REDUCE_OPS = (un.SUM, un.AVG, un.PRODUCT, un.MIN, un.MAX, un.BAND, un.BOR, un.BXOR)

# The types whose memory is at data_ptr(). Other subclasses may be wrappers around tensors.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
PLAIN_OR_NONE = PLAIN | {type(None)}

_STRIDED = torch.strided
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def reduce_op(op: Any) -> Any:
    """Translate a `torch.distributed.ReduceOp`, its factor included."""
    number = hash(op)
    if number < len(REDUCE_OPS):
        return REDUCE_OPS[number]
    if op != ReduceOp.PREMUL_SUM:
        raise ValueError(message("not an operation to reduce with", observed=str(op)))
    return un.premul_sum(version_names.factor(op))


def options(kind: type[Options], given: Any, **fields: Any) -> Options:
    """Return PyTorch's options: `given` if it is an options object, otherwise new ones with `fields`.

    A field that is None keeps its default. ProcessGroup methods are called as f(tensors, opts) and as
    f(tensor, op, timeout).
    """
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def single(what: str, given: Any) -> Any:
    """The tensor of a list of one. PyTorch's lists date from several GPUs in one process."""
    if isinstance(given, torch.Tensor):
        return given
    if len(given) != 1:
        raise ValueError(
            message(f"{what} takes one tensor", observed=f"a list of {len(given)}", expected="a list of 1")
        )
    return given[0]


class TensorArguments:
    """The buffers of one collective, ready for the Group, and the copies to be made afterwards.

    Example: `call = TensorArguments("broadcast"); group.broadcast(call.inout(x), src=0); call.after and
    call.after()`
    """

    __slots__ = ("_averaged", "_back", "inputs", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._averaged: tuple[torch.Tensor, int] | None = None
        self.inputs: list[torch.Tensor] | None = [] if profiling.is_on() else None  # for the profiler's event

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare a buffer that is read."""
        if self.inputs is not None:
            self.inputs.append(x)
        if _ready(x):
            return x
        x = self._dense(x)
        return x if _in_place(x) else _resolved(x)

    def inout(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare a buffer that is read and written."""
        if self.inputs is not None:
            self.inputs.append(x)
        if _ready(x):
            return x
        x = self._dense(x)
        return x if _in_place(x) else self._staged(x, _resolved(x))

    def write(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare a buffer that is written."""
        if _ready(x):
            return x
        x = self._dense(x)
        return x if _in_place(x) else self._staged(x, torch.empty(x.shape, dtype=x.dtype))

    def write_each(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Prepare buffers that are written, one for each rank."""
        buffers = [self.write(x) for x in outputs]
        if self._back:  # the Group sees the copies only
            originals = {id(copy): x for x, copy in self._back}
            self.refuse_shared_memory([originals.get(id(x), x) for x in buffers])
        return buffers

    def write_as_one(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Prepare one buffer that is written, for tensors of one shape that lie apart."""
        self.refuse_shared_memory(parts)
        buffer = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
        for x, copy in zip(parts, buffer, strict=True):
            self._staged(x, copy)
        return buffer

    def op(self, given: Any, x: torch.Tensor, ranks: int, like_nccl: bool, *, here: bool = True) -> Any:
        """Translate the reduce operation. here: this rank gets the result, in `x`.

        The Group refuses AVG of integers, as Gloo does. NCCL's, on a virtual GPU, is the sum divided by
        `ranks`, rounded towards zero: [1, -1] and [2, -2] -> [3, -3] / 2 -> [1, -1].
        """
        op = reduce_op(given)
        if op is not un.AVG or x.dtype not in _INTEGERS or not (like_nccl and x.is_cuda):
            return op
        self._averaged = (x, ranks) if here else None
        return un.SUM

    def splits(self, x: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
        """Cut `x` along its first dimension into `count` parts of `sizes`, equal parts if there are none.

        Example: count=2, sizes=[1, 3], shape [4, 5] -> shapes [1, 5] and [3, 5].
        """
        whole = x.shape[0] if x.dim() else 0
        if not sizes and whole % count == 0:
            sizes = [whole // count] * count
        if len(sizes) != count or sum(sizes) != whole:
            raise ValueError(
                message(
                    f"{self.what}: the split sizes do not fit the tensor",
                    observed=f"{list(sizes) or 'none'} for a first dimension of {whole}",
                    expected=f"{count} sizes that add up to {whole}",
                )
            )
        return list(torch.split(x, list(sizes)))

    @property
    def after(self) -> Callable[[], None] | None:
        """A function to call after the operation: it copies results back. None: nothing to copy."""
        return partial(_finish, self._back, self._averaged) if self._back or self._averaged else None

    def refuse_shared_memory(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raises ValueError: two elements that are written lie at one place, as after `expand`."""
        if share_memory(outputs):
            x = outputs[0]
            raise ValueError(
                message(
                    f"{self.what}: elements of an output share memory",
                    observed=f"shape {list(x.shape)} with strides {list(x.stride())}"
                    + (f" and {len(outputs) - 1} more" if len(outputs) > 1 else ""),
                    remedy="Pass an output with memory for each element: out.contiguous() or out.clone().",
                )
            )

    def _staged(self, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        if not surely_apart(x.shape, x.stride()):
            self.refuse_shared_memory([x])
        self._back.append((x, copy))
        return copy

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """Refuse tensors that are more than their CPU memory; unwrap PyTorch's lazy results."""
        if type(x) not in PLAIN and hasattr(x, "trigger_wait"):
            x = x.trigger_wait()
        stand_in = current() if x.is_cuda else None
        if not (x.is_cuda and stand_in is None):
            refuse_wrapper(x, f"{self.what}: the tensor")
        if stand_in:
            x = stand_in.on_host(x.detach())
        if not x.is_cpu:
            raise ValueError(
                message(
                    f"{self.what} got a tensor on {x.device}",
                    expected="a CPU tensor",
                    remedy="A call takes tensors of one device, the CPU or CUDA.",
                )
            )
        return x


def _ready(x: torch.Tensor) -> bool:
    """Whether the Group can take `x` unchanged: nearly always."""
    return type(x) in PLAIN and x.layout is _STRIDED and x.is_cpu and _in_place(x)


def _in_place(x: torch.Tensor) -> bool:
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _resolved(x: torch.Tensor) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _finish(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], averaged: tuple[torch.Tensor, int] | None
) -> None:
    with torch.no_grad():
        for original, copy in pairs:
            original.detach().copy_(copy)
        if averaged:
            x, ranks = averaged
            x.detach().div_(ranks, rounding_mode="trunc")
