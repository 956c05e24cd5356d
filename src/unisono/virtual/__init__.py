"""Virtual GPUs: CUDA devices in host memory. Code for several GPUs runs, and fails, as on GPUs.

    unisono run --virtual-gpus 4 train.py       # or, in a program, before PyTorch is imported:
    import unisono.virtual
    unisono.virtual.enable(4)

See docs/virtual-gpus.md. Importing this module imports neither PyTorch nor NumPy.
"""

from __future__ import annotations

from .environment import VirtualGpuSettings
from .startup import enable, enabled

__all__ = ["VirtualGpuSettings", "enable", "enabled"]
