"""Tensors in memory that the other ranks of a host read in place; see `unisono.empty`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import unisono


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new CPU tensor, as from `torch.empty`, that collectives of any group read without a copy.

    Example: `flat = unisono.torch.empty(model_numel, dtype=torch.bfloat16)`

    Args:
        size: the lengths of the axes, one by one or as a sequence.  dtype: PyTorch's default, if not given.
    Raises:
        MemoryError: not enough memory.
    """
    lengths = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    shape = torch.Size(lengths)  # type: ignore[arg-type]
    wanted = dtype or torch.get_default_dtype()
    if not shape.numel():
        return torch.empty(shape, dtype=wanted)
    memory = unisono.empty(shape.numel() * wanted.itemsize, "uint8")
    return torch.frombuffer(memory, dtype=wanted).view(shape)
