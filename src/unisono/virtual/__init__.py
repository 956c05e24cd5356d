"""Virtual GPUs: CUDA devices in host memory. Code for several GPUs runs, and fails, as on GPUs.

    unisono run --virtual-gpus 4 train.py       # or, in a program, before PyTorch is imported:
    import unisono.virtual
    unisono.virtual.enable(4)

See docs/virtual-gpus.md. Importing this module imports neither PyTorch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .environment import VirtualGpuSettings
from .startup import enable, enabled

__all__ = ["VirtualGpuSettings", "enable", "enabled"]


if not TYPE_CHECKING:  # to a type checker a name that does not exist is an error

    def __getattr__(name: str) -> Any:
        if name != "Settings":
            raise AttributeError(f"module 'unisono.virtual' has no attribute {name!r}")
        import warnings

        warnings.warn("unisono.virtual.Settings is now VirtualGpuSettings", DeprecationWarning, stacklevel=2)
        return VirtualGpuSettings
