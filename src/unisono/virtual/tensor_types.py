"""`torch.cuda.FloatTensor` and the like: PyTorch's oldest names for types of tensors."""

from __future__ import annotations

from typing import Any

import torch

NAMES = {
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64,
    "Bool": torch.bool,
}  # fmt: skip


class _LegacyTensorType(type):
    """The metaclass of these types: a call makes a tensor; isinstance compares dtype and device."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], int):
            return torch.empty(args, dtype=cls.dtype, device="cuda")
        return torch.tensor(args[0] if args else [], dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def install() -> None:
    """Add them to `torch.cuda`."""
    module: Any = torch.cuda
    for name, dtype in NAMES.items():
        given = {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True}
        setattr(module, f"{name}Tensor", _LegacyTensorType(f"{name}Tensor", (), given))
