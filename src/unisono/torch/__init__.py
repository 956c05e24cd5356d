"""`import unisono.torch` registers the backend "unisono" with torch.distributed, and nothing else.

    import torch.distributed as dist
    import unisono.torch
    dist.init_process_group("unisono")

From there on it is PyTorch's own API: DDP, `dist.all_reduce`, `new_group`, object collectives ...
"""

from __future__ import annotations

import torch.distributed as _dist

from .process_group import create as _create

__all__: list[str] = []

_dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
