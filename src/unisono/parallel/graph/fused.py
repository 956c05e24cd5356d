"""The layers that the tensor axis runs on parts, and layers that are several things as several layers.

Of a layer it is known which dims of its weight are inputs and outputs. The search for a cut is told where
cuts pay, and the cuts that a caller names by modules. Fused output features, such as query, key and value:

| what the model has | what stands for it | its parameters |
|---|---|---|
| a Linear or Conv1D whose output is split | `SplitColumns` | q.weight, k.weight, v.weight; or 0.weight, ... |
| `nn.MultiheadAttention` | `SplitHeads` | q.weight, k.weight, v.weight, out_proj.weight |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.torch_internals.training import module_at

from .program import Frame, Graph


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs with this module that another module in its place would lose."""
    return "forward" in vars(module) or is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, of forward or of backward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make the parameter that stands for `old`: frozen where it is, with what the user noted on it."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(vars(old))
    return new


class FusedLayer:
    """One layer that several stand for.

    Args:
        path: of it.
        names: of the several, in it.
        sizes: output features of each.
        leaves: parameter of the one -> of each of the several.
        turned: the one is [in, out].
    """

    def __init__(
        self, path: str, names: Iterable[str], sizes: Iterable[int], leaves: Mapping[str, str], turned: object
    ) -> None:
        self.path, self.names, self.sizes = path, tuple(names), tuple(sizes)
        self.leaves, self.turned = dict(leaves), bool(turned)

    def about(self) -> dict[str, Any]:
        """Itself as JSON."""
        return dict(vars(self))

    def parts(self, leaf: str) -> list[str]:
        """The names of what stands for a parameter of the one."""
        return [f"{self.path}.{name}.{self.leaves[leaf]}" for name in self.names]

    def cut(self, place: int, whole: Tensor) -> Tensor:
        """What the several have of a parameter of the one: that at `place`."""
        part: Tensor = whole.split(self.sizes, -1 if self.turned else 0)[place]
        return part.t() if self.turned and part.dim() == 2 else part

    def join(self, parts: list[Tensor]) -> Tensor:
        """The parameter of the one, from those of the several."""
        turned = [part.t() if self.turned and part.dim() == 2 else part for part in parts]
        return torch.cat(turned, -1 if self.turned else 0)


class Split(nn.Module):
    """Several linear layers in place of one. Attributes: fused (the parameters of the one, by leaf)."""

    fused: dict[str, str]  # parameter of the one -> of each of the several
    names: tuple[str, ...]
    _sizes: tuple[int, ...]
    _turned = False  # the one is [in, out]

    def _fill(self, module: Any, width: int) -> None:
        for name, size in zip(self.names, self._sizes, strict=True):
            self.add_module(name, nn.Linear(width, size, bias="bias" in self.fused.values(), device="meta"))
        given = {leaf: getattr(module, leaf).data for leaf in self.fused}
        for path, value in self.parts("", given).items():
            at, _, name = path.lstrip(".").partition(".")
            leaf = next(leaf for leaf, short in self.fused.items() if short == name)
            setattr(self.get_submodule(at), name, like(getattr(module, leaf), value))

    def parts(self, path: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cut the parameters of the one; return them by their paths, this module being at `path`."""
        layer = self.layer(path)
        return {
            name: layer.cut(place, value).clone(memory_format=torch.contiguous_format)
            for leaf, value in given.items()
            for place, name in enumerate(layer.parts(leaf))
        }

    def layer(self, path: str) -> FusedLayer:
        """The one, this module being at `path`."""
        return FusedLayer(path, self.names, self._sizes, self.fused, self._turned)


class SplitColumns(Split):
    """A fused Linear [out, in] or Conv1D [in, out] as several linear layers, each cut by column.

    Three of one size are called q, k and v; others 0, 1 and so on.
    """

    def __init__(self, module: Any, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes, self._turned = tuple(sizes), not isinstance(module, nn.Linear)
        self.in_features, self.out_features = module.weight.shape[0 if self._turned else 1], sum(sizes)
        alike = len(sizes) == 3 and len(set(sizes)) == 1
        self.names = tuple("qkv") if alike else tuple(map(str, range(len(sizes))))
        self.fused = {leaf: leaf for leaf in ("weight", "bias") if getattr(module, leaf, None) is not None}
        self._fill(module, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in self.names], dim=-1)


def can_split_heads(module: nn.Module) -> bool:
    """Whether SplitHeads computes what `module` does."""
    given: Any = module
    if type(module) is not nn.MultiheadAttention or given.in_proj_weight is None or has_hooks(module):
        return False
    return given.bias_k is None and not given.add_zero_attn


class SplitHeads(Split):
    """nn.MultiheadAttention with a layer for each of query, key and value; heads can be cut."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = module.embed_dim, module.num_heads, module.head_dim
        self.batch_first, self.dropout = module.batch_first, module.dropout
        self.kdim = self.vdim = module.embed_dim
        self._qkv_same_embed_dim = False  # nn.TransformerEncoderLayer then calls forward in evaluation, too
        self.names, self._sizes = tuple("qkv"), (module.embed_dim,) * 3
        self.fused = {"in_proj_weight": "weight"}
        if module.in_proj_bias is not None:
            self.fused["in_proj_bias"] = "bias"
        self._fill(module, module.embed_dim)
        self.out_proj = nn.Linear(
            module.embed_dim, module.embed_dim, bias=module.out_proj.bias is not None, device="meta"
        )
        self.out_proj.weight = module.out_proj.weight
        self.out_proj.bias = module.out_proj.bias
        self.train(module.training)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """What nn.TransformerEncoderLayer asks for."""
        q: Any = self.q
        return q.bias  # type: ignore[no-any-return]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        alone = query.dim() == 2
        if alone:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            self.get_submodule(name)(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name, x in zip("qkv", (query, key, value), strict=True)
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        dropped = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = functional.dropout(weights, dropped) if dropped else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if alone:
            return output.squeeze(0), weights if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the scores [rows, heads, query, key]."""
        masks = []
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.unflatten(0, (q.shape[0], -1)) if mask.shape[0] > 1 else mask.unsqueeze(0)
            masks.append(_added(mask, q.dtype))
        if padding is not None:
            padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
            masks.append(_added(padding[:, None, None], q.dtype))
        return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans, True where nothing is seen, as one that is added."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def split_(model: nn.Module, path: str, sizes: Sequence[int]) -> None:
    """Put several layers in place of the one at `path`. Attention has no sizes."""
    above, _, name = path.rpartition(".")
    module = module_at(model, path)
    if not isinstance(module, Split):
        made: Any = SplitColumns(module, sizes) if sizes else SplitHeads(module)  # type: ignore[arg-type]
        module_at(model, above).register_module(name, made)


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
