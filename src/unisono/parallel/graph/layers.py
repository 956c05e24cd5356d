"""The layers that the tensor axis runs on parts: which dims of their weights are inputs and outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

__all__ = ["Layer", "layer_of"]


class Layer(NamedTuple):
    """The dims of a weight: output features, input features. None: it has no such."""

    output_dim: int | None
    input_dim: int | None


CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[Any], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def layer_of(module: nn.Module) -> Layer | None:
    """The dims of a layer whose forward is PyTorch's (or Hugging Face's Conv1D); None: another module."""
    if "forward" in vars(module):  # of this module alone
        return None
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return Layer(0, 1)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return Layer(1, 0)
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return Layer(1, None) if plain else None
    for known in CONVOLUTIONS:
        if isinstance(module, known) and kind.forward is known.forward and module.groups == 1:
            return Layer(0, 1)
    for known in TRANSPOSED:
        if isinstance(module, known) and kind.forward is known.forward and module.groups == 1:
            return Layer(1, 0)
    return None
