"""The class of a module as its author wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from torch import nn


def plain_class(model: nn.Module) -> type:
    """The class that the user made; fully_shard puts one of its own before it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
