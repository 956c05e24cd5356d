"""`import unisono.torch` registers the backend "unisono" with torch.distributed, and provides `empty`.

    import torch.distributed as dist
    dist.init_process_group("unisono")

PyTorch imports this module itself at `import torch` (see autoload.py), so a script need not. Everything else
is PyTorch's own API: DDP, `dist.all_reduce`, `new_group`, object collectives. `reconfigure` makes a group
anew, with other processes. `Store(store)` is a store of Unisono for what takes one of PyTorch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory import empty
from .registration import register as _register

if TYPE_CHECKING:
    from unisono.engine.backends.torch_store import EngineStore as Store

    from .reconfiguration import get_reconfigure_handle, reconfigure, supports_reconfigure

__all__ = ["Store", "empty", "get_reconfigure_handle", "reconfigure", "supports_reconfigure"]

_register()


if not TYPE_CHECKING:  # imported at the first use: PyTorch imports this module at every start

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Store":
            from unisono.engine.backends.torch_store import EngineStore

            return EngineStore
        from . import reconfiguration

        return getattr(reconfiguration, name)
