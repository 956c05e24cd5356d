"""What PyTorch's process groups offer and Unisono does not have: each raises NotImplementedError in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.errors import message

UNSUPPORTED = {
    "new_window": "there are no one-sided windows. Use send and recv, or unisono.torch.empty for memory that "
    "other ranks of a host read.",
    "split": "a backend is not split by itself. Use torch.distributed.split_group or new_group.",
    "merge": "a backend is not merged by itself. Use merge_remote_group of the process group.",
    "suspend": "a group holds no memory of a device that it could give back.",
    "resume": "a group holds no memory of a device that it could give back.",
    "memory_stats": "a group holds no memory of a device.",
    "allocate_tensor": "the backend needs no memory of its own. Use torch.empty or unisono.torch.empty.",
    "_enable_collectives_timing": "a Work has no duration of its own. Use PyTorch's profiler.",
    "_start_time_estimate": "there are no estimates of a block of calls. choice() estimates one call.",
    "_end_time_estimate": "there are no estimates of a block of calls. choice() estimates one call.",
    "setUsePgForSymmMemRendezvous": "symmetric memory is for GPUs.",
}
"""By the method's name: the reason, and what to use."""


class UnsupportedMethods:
    """Methods that raise NotImplementedError."""

    supports_window = False
    supports_completion_hooks = False
    _supports_time_estimate = False

    @property
    def mem_allocator(self) -> Any:
        """Raise NotImplementedError: there is no allocator of a device."""
        raise NotImplementedError(_text("mem_allocator", UNSUPPORTED["allocate_tensor"]))


def _text(name: str, reason: str) -> str:
    return message(f"unisono's process groups have no {name}: {reason}")


def _raising(name: str, reason: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_text(name, reason))

    call.__name__ = name
    call.__doc__ = f"Raise NotImplementedError: {reason}"
    return call


for _name, _reason in UNSUPPORTED.items():
    setattr(UnsupportedMethods, _name, _raising(_name, _reason))
