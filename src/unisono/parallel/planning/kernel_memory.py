"""Bytes that an operator's kernels take and give back within it, which the allocator counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KernelMemory", "copy_in", "kernel_memory"]

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
