"""What fully_shard and the tensor axis need of what a unit returns: own memory, tensors that show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import UnfitError
from unisono.torch_internals import training

from .graph.containers import mapped, strange_in, tensors_in
from .plain_class import plain_class

if TYPE_CHECKING:
    from torch import nn

__all__ = ["own_memory", "shows_tensors"]


def own_memory(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Return no views: fully_shard loses its hook on one that is written into, as nn.ReLU(True) does, and
    the tensor axis forbids it.
    """
    if any(map(training.is_view, tensors_in(output))):
        return mapped(output, lambda tensor: tensor.clone() if training.is_view(tensor) else tensor)
    return output


def shows_tensors(module: nn.Module, _args: Any, output: Any) -> None:
    """Refuse an output that hides its tensors, as a distribution does: fully_shard would begin no backward.

    Raises:
        ValueError: the text names the object.
    """
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors_in(output)):
        for hiding in strange_in(output):
            raise UnfitError(
                f"{plain_class(module).__name__} returns a {type(hiding).__name__}, which hides its tensors, "
                "so gradients would not be reduced. Return tensors in a tuple, dict or dataclass, and make "
                'the object in the loss; or use zero=0 with precision="f32"'
            )
