"""What NCCL refuses and the engine would take: layouts, types and operations, with PyTorch's errors.

Source: PyTorch's ProcessGroupNCCL (check_gpu_single_tensor, getNcclDataType, getNcclReduceOp).
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.torch.cuda import first_tensor
from unisono.torch_internals.c10d import ReduceOp

CONTIGUOUS = {
    "allreduce": (0,), "broadcast": (0,), "reduce": (0,), "allgather": (1,), "reduce_scatter": (0,),
    "gather": (1,), "scatter": (0,), "all_gather_single": (0, 1), "reduce_scatter_single": (0, 1),
    "all_to_all_single": (0, 1),
}  # fmt: skip
"""The arguments of each method that must be contiguous."""

NO_TYPES = {torch.int16: "Short", torch.uint16: "UInt16", torch.uint32: "UInt32", torch.uint64: "UInt64"}
NO_OPS = {"BAND": ReduceOp.BAND, "BOR": ReduceOp.BOR, "BXOR": ReduceOp.BXOR}


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of a process group's method as NCCL does.

    Raises:
        TypeError: NCCL has no such type.    ValueError: it has no such operation, or wants contiguous memory.
    """
    given = (*args, *kwargs.values())
    tensor = first_tensor(given)
    if tensor.dtype in NO_TYPES:
        text = f"Input tensor data type is not supported for NCCL process group: {NO_TYPES[tensor.dtype]}"
        raise TypeError(text)
    for value in given[1:]:
        op = getattr(value, "reduceOp", value)
        for word, refused in NO_OPS.items():
            if isinstance(op, (ReduceOp, ReduceOp.RedOpType)) and op == refused:
                raise ValueError(f"Cannot use ReduceOp.{word} with NCCL")
    for at in CONTIGUOUS.get(name, ()):
        found = first_tensor(given[at]) if at < len(given) else None
        if found is not None and found.layout is torch.strided and not _in_one_piece(found):
            raise ValueError("Tensors must be contiguous")


def _in_one_piece(tensor: torch.Tensor) -> bool:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (
        channels_last is not None and tensor.is_contiguous(memory_format=channels_last)
    )
