"""Makes the names "unisono" and, if UNISONO_REPLACE says so, "gloo" lead to Unisono.

This runs at every `import torch`, so it imports nothing of the engine: that waits for the first group.
How "gloo" is replaced, and why so, is told in docs/adr/0005-replacing-gloo.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from unisono import env, virtual

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["ORIGINAL", "register"]

ORIGINAL = "original_gloo"
"""The name under which PyTorch's own Gloo can be had while "gloo" is replaced."""


def register() -> None:
    """Register the backend; replace Gloo if the environment says so. May be called again.

    Raises:
        ValueError: UNISONO_REPLACE is malformed.
    """
    c10d.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
    module: Any = c10d  # a type checker knows its classes as constants
    if virtual.enabled():
        from . import nccl

        nccl.make()
    original = getattr(module, "ProcessGroupGloo", None)  # None: PyTorch without Gloo says so itself
    if env.replaced() == "gloo" and type(original) not in (StandIn, type(None)):
        module.Backend.register_backend(ORIGINAL, original, devices=["cpu"])
        module.ProcessGroupGloo = StandIn("ProcessGroupGloo", (), {"original": original})


def _create(given: Any, backend_options: Any) -> ProcessGroup:
    from .process_group import create

    return create(given, backend_options)


class StandIn(type):
    """The type of what stands where distributed_c10d looks for the class ProcessGroupGloo.

    Called, it makes a process group of Unisono. In everything else it is PyTorch's class, and real Gloo
    groups remain instances of it.
    """

    original: Any

    def __call__(cls, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
        """Make a group that answers to the name "gloo"."""
        from .process_group import NOWHERE, ProcessGroupUnisono, Within, world

        # Every rank must say the same here, and the group's own name comes only later, as do its ranks.
        everybody = c10d.GroupMember.WORLD
        within = NOWHERE if everybody is None else Within(world(), range(everybody.size()))
        name = "world" if everybody is None else "group"
        return ProcessGroupUnisono(store, rank, size, timeout, name, backend="gloo", within=within)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Say yes to the groups made here as well, which is what distributed_c10d asserts of them."""
        from .process_group import ProcessGroupUnisono

        ours = isinstance(instance, ProcessGroupUnisono) and instance.name() == "gloo"
        return ours or isinstance(instance, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)
