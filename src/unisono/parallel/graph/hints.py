"""What the search for a cut is told: where cuts pay, and the cuts that a caller names by modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from unisono.torch_internals.training import module_at

from .fused import Split
from .layers import Layer

__all__ = ["KINDS", "NOT_NAMED", "NO_SUM", "Hints", "named_dim", "of_parts"]

KINDS = ("column", "column, gathered", "row", "vocabulary", "whole")
NOT_NAMED = "cuts= does not name it"
NO_SUM = "no layer sums over it afterwards"


class Hints(NamedTuple):
    """Where cuts pay: embeddings to cut by rows, and layers whose output is gathered.

    kinds: the caller's cuts, path -> kind; nothing else is cut. None: the program decides.
    """

    vocabulary: frozenset[str]
    gathered: frozenset[str]
    kinds: dict[str, str] | None = None


def of_parts(model: nn.Module, kinds: dict[str, str]) -> dict[str, str]:
    """Path -> kind, of the layers that stand for a fused one in `model`, in place of the one."""
    found: dict[str, str] = {}
    for path, kind in kinds.items():
        module = module_at(model, path)
        names = [f"{path}.{name}" for name in module.names] if isinstance(module, Split) else [path]
        found |= dict.fromkeys(names, kind)
    return found


def named_dim(module: nn.Module, layer: Layer | None, kind: str) -> int | None:
    """The dim that this kind cuts of the weight of a layer; None: it is no layer that can be cut so."""
    if layer is None or (kind == "vocabulary" and not isinstance(module, nn.Embedding)):
        return None
    return 0 if kind == "vocabulary" else layer.input_dim if kind == "row" else layer.output_dim
