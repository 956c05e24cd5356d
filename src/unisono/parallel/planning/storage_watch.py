"""Counts the memory of a program that runs on shapes: each storage, from its operator to its end.

What an operator's kernels take and give back within it is not seen: the tables here say it, of what is known.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.torch_internals import autograd
from unisono.torch_internals.fake import OperatorMode, memory_of, number_read

from .memory_account import Charge, ProgramLocation

__all__ = ["KernelMemory", "StorageWatch", "copy_in", "kernel_memory"]

KernelMemory = Callable[..., int]
"""(result, *arguments) -> bytes."""

MULTIPROCESSORS, THREADS = 132, 2048
"""Of the largest GPUs, and of each of them; a smaller one takes less."""

BLOCK, WARP = 512, 32
LEAST_VALUES, MOST_VALUES = 16, 256  # of a thread


def column_sum(made: Tensor, given: Tensor, dims: Any = None, *_: Any) -> int:
    """Partial sums over the leading dimensions, of which each block of threads writes its own.

    Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and global_memory_size.
    Example: [6304, 768] -> [768] takes 37.1 MiB, and [6304, 3072] -> [3072] 132 MiB.
    """
    columns = made.numel()
    leading = dims is not None and sorted(dim % given.dim() for dim in dims) == [*range(len(dims))]
    if not leading or len(dims) == given.dim() or columns < 2 or not given.is_contiguous():
        return 0
    rows = given.numel() // columns
    wide = next(width for width in (4, 2, 1) if columns % width == 0)
    across = min(_power(columns // wide), WARP)
    down = min(_power(rows), BLOCK // wide // across)
    values, grid = -(-rows // down), -(-columns // wide // across)
    target = MULTIPROCESSORS * THREADS // (across * down)
    if values < MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return 4 * columns * blocks * across * wide if blocks > 1 else 0


def _power(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << max(1, number).bit_length() - 1


def convolution(made: Tensor, given: Tensor, weight: Tensor, _bias: Any, stride: Any, *_: Any) -> int:
    """cuDNN's copies with the channels last, of the input and of the result."""
    return 0 if _is_product(weight, stride) else given.nbytes + made.nbytes


def convolution_backward(
    _made: Any, grad: Tensor, given: Tensor, weight: Tensor, _bias: Any, stride: Any, *_: Any
) -> int:
    """The same, of the input and of the gradient."""
    return 0 if _is_product(weight, stride) else given.nbytes + grad.nbytes


def _is_product(weight: Tensor, stride: Any) -> bool:
    """Whether a convolution multiplies each position alone: no copies are made."""
    return weight.shape[2:].numel() == 1 and all(step == 1 for step in stride)


def copy_in(grads: Sequence[Tensor], parts: int, dtype: torch.dtype, *, fused: bool) -> list[int]:
    """Copies that `fully_shard` makes of gradients on their way into one buffer, in bytes of each.

    Gradients of several types are cast to that of the buffer first. Those that are not contiguous, or whose
    rows are not a multiple of `parts`, are copied.

    Args:
        dtype: of the buffer.
        fused: kernels of a GPU read contiguous gradients as they are, in the buffer's type, or bf16 for f32.
    Source: torch/csrc/distributed/fsdp/ChunkCat.cpp; aten/src/ATen/native/cuda/TensorShape.cu.
    Example: f32 [4, 8] and bf16 [6, 8] into f32 of 4 parts -> 192 and 256, fused none.
    """
    types = {grad.dtype for grad in grads}
    contiguous = all(grad.is_contiguous() for grad in grads)
    read = {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}
    if fused and contiguous and types <= read:
        return []
    cast = len(types) > 1
    pads = not (fused and contiguous and cast)  # what is cast is in the buffer's type
    found = []
    for grad in grads:
        size = dtype.itemsize if cast else grad.itemsize
        if cast and grad.dtype != dtype:
            found.append(grad.numel() * size)
        rows = -(-grad.shape[0] // parts) * parts
        if pads and (rows > grad.shape[0] or not grad.is_contiguous()):
            found.append(rows * grad.shape[1:].numel() * size)
    return found


ANYWHERE: dict[str, KernelMemory] = {
    # the result, and where nothing is seen
    "aten::_safe_softmax": lambda made, *_: made.nbytes + made.numel(),
    "aten::linalg_vector_norm": lambda made, given, *_: (
        given.numel() * made.itemsize * (made.dtype != given.dtype)
    ),
}
ON_GPU: dict[str, KernelMemory] = {
    # the kernel multiplies the gradient and the result first: aten/src/ATen/native/cuda/SoftMax.cu
    "aten::_softmax_backward_data": lambda _made, grad, *_: grad.nbytes,
}
REAL: dict[str, KernelMemory] = {
    "aten::sum.dim_IntList": column_sum,
    "aten::convolution": convolution,
    "aten::convolution_backward": convolution_backward,
}


def kernel_memory(*, on_gpu: bool, virtual: bool) -> dict[str, KernelMemory]:
    """Operator -> what its kernels take, of its result and its arguments.

    Args:
        on_gpu: the operators run on a GPU.    virtual: which is in host memory, and has no kernels of cuDNN.
    """
    return {**ANYWHERE, **(ON_GPU if on_gpu else {}), **(REAL if on_gpu and not virtual else {})}


HERE = os.path.dirname(__file__) + os.sep
PACKAGES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class StorageWatch(OperatorMode):
    """A mode that charges every new storage on one type of device.

    Args:
        device_type: of the shapes.
        inside: operator -> bytes that its kernels take and give back within it.
    Attributes:
        account: takes the charges. Its `where` is this object's `place`.
        cause: of what is made now.
        phase: of the step.
        numbers: a number that is read from a tensor is 1, or 0.5; otherwise such a program raises.
    """

    def __init__(self, device_type: str, inside: dict[str, KernelMemory]) -> None:
        super().__init__()
        self._inside = inside
        self.account: Any = None
        self.cause, self.phase, self.numbers = "temporary", "", False
        self._device_type = device_type
        self._charges: dict[int, Charge | None] = {}  # of a storage, by its address; None: it is not counted
        self._ends: dict[int, Any] = {}
        self._modules: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}  # number of an autograd function -> module, line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.numbers and (number := number_read(func, args)) is not None:
            return number
        output = func(*args, **(kwargs or {}))
        inside = self._inside.get(func.name())
        if inside is not None and args[0].device.type == self._device_type:
            self.account.release(self.account.charge(inside(output, *args), "temporary"))
        if isinstance(output, Tensor):
            self.see(output)
        elif isinstance(output, (tuple, list)):
            for part in output:
                if isinstance(part, Tensor):
                    self.see(part)
        if self._modules and self.phase == "forward":
            self._places.setdefault(autograd.next_sequence() - 1, (self._modules[-1], _line()))
        return output

    def see(self, tensor: Tensor, *, counts: bool = True) -> None:
        """Charge the storage of a tensor, if it is new. `counts`: otherwise it is never charged."""
        if tensor.device.type != self._device_type:
            return
        storage, key = memory_of(tensor)
        if key in self._charges:
            return
        charge = self.account.charge(storage.nbytes(), self.cause) if counts else None
        self._charges[key] = charge
        self._ends[key] = weakref.ref(storage, lambda _: self._end(key))

    def relabel(self, tensor: Tensor, cause: str) -> None:
        """Count the storage of a tensor under another cause."""
        charge = self._charges.get(memory_of(tensor)[1])
        if charge is not None:
            self.account.relabel(charge, cause)

    def leave(self, tensor: Tensor) -> None:
        """Count the storage of a tensor no more: a run frees its memory, and keeps the tensor."""
        key = memory_of(tensor)[1]
        charge = self._charges.get(key)
        if charge is not None:
            self._charges[key] = None
            self.account.release(charge)

    def come(self, tensor: Tensor, cause: str) -> None:
        """Count the storage of a tensor that has left: it has memory again."""
        storage, key = memory_of(tensor)
        if self._charges[key] is None and tensor.device.type == self._device_type:
            self._charges[key] = self.account.charge(storage.nbytes(), cause)

    def _end(self, key: int) -> None:
        charge = self._charges.pop(key, None)
        self._ends.pop(key, None)
        if charge is not None:
            self.account.release(charge)

    @contextmanager
    def labelled(self, cause: str) -> Iterator[None]:
        """Charge what is made here to another cause."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def follow(self, root: nn.Module, names: dict[nn.Module, str]) -> None:
        """Know where the program is: in which of these modules."""
        for module in root.modules():
            path = names.get(module, "")
            module.register_forward_pre_hook(self._enter(path), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str) -> Any:
        return lambda *_: self._modules.append(path)

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def place(self) -> ProgramLocation:
        """Where the program is now."""
        if self.phase == "backward" and not self._modules:
            return ProgramLocation(self.phase, *self._places.get(autograd.running_sequence(), ("", "")))
        path = self._modules[-1] if self._modules else ""
        again = self.phase == "backward"
        return ProgramLocation(
            "recomputation" if again else self.phase, path, _line() if path or not again else ""
        )


def _line() -> str:
    """The innermost line of the program; "" where PyTorch's modules and this package are all that runs."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        if frame.f_code.co_name == "_step" and frame.f_code.co_filename.startswith(HERE):
            return ""
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
