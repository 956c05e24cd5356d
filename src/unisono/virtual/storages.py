"""Makes and resizes storages of device memory, which PyTorch's CPU build cannot."""

from __future__ import annotations

from typing import Any

import torch

from .cuda import refusal


def install() -> None:
    """Let `torch.UntypedStorage` make and resize storages of virtual GPUs."""
    kind: Any = torch.UntypedStorage
    make, resize = kind.__new__, kind.resize_

    def __new__(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:  # noqa: N807
        if device is None or torch.device(device).type != "cuda" or cls is not kind or kwargs:
            extra = kwargs if device is None else {**kwargs, "device": device}
            return make(cls, *args, **extra)
        torch.cuda.init()  # type: ignore[no-untyped-call,unused-ignore]
        given = args[0] if args else 0
        make_tensor: Any = torch.empty if isinstance(given, int) else torch.tensor
        return make_tensor(given, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        over = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.unisono_virtual.resize_storage(over, size)
        return self

    kind.__new__ = __new__
    kind.resize_ = resize_
    for name in ("_share_cuda_", "_new_shared_cuda"):
        setattr(kind, name, refusal(name, "its memory is that of one process: send CPU tensors"))
