"""The layers that the tensor axis runs on parts, and what the search for a cut is told of them.

Of a layer it is known which dims of its weight are inputs and outputs. The search is told where cuts pay, and
the cuts that a caller names by modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from unisono.torch_internals.training import module_at

from .fused import Split
from .program import Frame, Graph


class Layer(NamedTuple):
    """The dims of a weight: output features, input features. None: it has no such."""

    output_dim: int | None
    input_dim: int | None


# What a linear layer may do beside its product, so that a partial sum stays one; its bias is added once
PRODUCT = {
    "aten.mm", "aten.addmm", "aten.t", "aten.transpose", "aten.permute", "aten.view", "aten._unsafe_view",
    "aten.add", "aten.detach", "aten.expand",
}  # fmt: skip
CONVOLUTIONS: dict[Any, Layer] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Layer(0, 1)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Layer(1, 0)),
}


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
    for known, dims in CONVOLUTIONS.items():
        if isinstance(module, known) and kind.forward is known.forward and module.groups == 1:
            return dims
    return None


def is_product(graph: Graph, frame: Frame, weight: int | None, bias: int | None) -> bool:
    """Whether a module's forward is one product of its input and its weight, and its bias."""
    nodes = graph.nodes[frame.begin : frame.end]
    made = {number for node in nodes for number in node.outputs}
    known = made | {weight, bias} | set(frame.inputs[:1])
    given = [node.taken for node in nodes]
    added = [values for node, values in zip(nodes, given, strict=True) if node.name == "aten.add"]
    biases = [node.args[0].value for node in nodes if node.name == "aten.addmm"]
    return (
        {node.name for node in nodes} <= PRODUCT
        and sum(node.name in ("aten.mm", "aten.addmm") for node in nodes) == 1
        and all(node.frames[-1] == frame.number for node in nodes)
        and all(value in known for values in given for value in values)
        and all(bias in values and values.count(bias) == 1 for values in added)
        and all(bias == value for value in biases)
        and len(added) + len(biases) <= 1
    )


# ---- what the search is told ----


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
