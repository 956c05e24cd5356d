"""`import unisono.torch` registers the backend "unisono" with torch.distributed, and provides `empty`.

    import torch.distributed as dist
    dist.init_process_group("unisono")

PyTorch imports this module itself at `import torch` (see autoload.py), so a script need not. Everything else
is PyTorch's own API: DDP, `dist.all_reduce`, `new_group`, object collectives.
"""

from __future__ import annotations

from .memory import empty
from .registration import register as _register

__all__ = ["empty"]

_register()
