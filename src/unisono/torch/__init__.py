"""`import unisono.torch` registers the backend "unisono" with torch.distributed, and nothing else.

    import torch.distributed as dist
    dist.init_process_group("unisono")

PyTorch imports this module itself at `import torch` (see autoload.py), so a script need not. From there on
it is PyTorch's own API: DDP, `dist.all_reduce`, `new_group`, object collectives ...
"""

from __future__ import annotations

from .registration import register as _register

__all__: list[str] = []

_register()
