"""Rules for families of models: their pieces in order, their units, and how each module is cut.

A piece is a module that takes what the piece before it returns. Stages are runs of pieces. A unit is a
module whose parameters are gathered and reduced together. Rules go by the type and the name of modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .graph.fused import SplitColumns
from .plan import UnfitError
from .tensor_parallel import KINDS

ELEMENTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Dropout, nn.Identity
)  # fmt: skip
GPT2 = (
    r"transformer\.(wte|wpe)\.weight|lm_head\.weight|transformer\.(h\.\d+\.(ln_1|ln_2|attn\.c_attn\.[qkv]|"
    r"attn\.c_proj|mlp\.c_fc|mlp\.c_proj)|ln_f)\.(weight|bias)"
)
LLAMA = (
    r"model\.(embed_tokens|norm)\.weight|lm_head\.weight|model\.layers\.\d+\.((self_attn\.[qkvo]_proj|"
    r"mlp\.(gate|up|down)_proj)\.(weight|bias)|(input|post_attention)_layernorm\.weight)"
)
COLUMN = re.compile(
    r"(^|\.)(q|k|v|query|key|value|[qkv]_proj|gate_proj|up_proj|fc1|w1|w3|mlp_in|linear1|c_fc)$"
)
ROW = re.compile(r"(^|\.)(o_proj|out_proj|attention_out|down_proj|fc2|w2|mlp_out|linear2)$")
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def identity(output: Any) -> Any:
    """Return what a model returned."""
    return output


def no_localization(tensor: int) -> None:
    """Do nothing: the model does not depend on how many ranks share its layers."""


@dataclass
class ModelFamily:
    """One model, seen by a rule. `pieces` is empty where the rule does not know their order."""

    name: str
    pieces: list[nn.Module] = field(default_factory=list)
    units: list[nn.Module] = field(default_factory=list)
    cuts: dict[str, str] = field(default_factory=dict)
    output: Callable[[Any], Any] = identity
    localize: Callable[[int], None] = no_localization  # tells attention how many heads are here
    proved: bool = False  # the cuts are right for this code, whatever the sizes: see cut_check.py
    no_pieces: str = ""  # why the pieces do not compute what the model does


def family_of(
    model: nn.Module, pieces: Sequence[nn.Module] | None, cuts: dict[str, str] | None
) -> ModelFamily:
    """Find the rule for `model`; the caller's arguments come first.

    Args:
        pieces: modules of the model in the order they run, each taking what the one before returns.
        cuts: pattern of paths ("blocks.*.fc") -> kind of cut, over the rule's.
    """
    name = type(model).__name__
    if name == "GPT2LMHeadModel":
        family = _gpt2(model)
    elif name in LLAMA_LIKE:
        family = _llama(model)
    else:
        family = _by_names(model)
    family.proved = family.proved and not cuts and pieces is None
    if pieces is not None:
        family.no_pieces = ""
        family.pieces = list(pieces)
        family.units = [piece for piece in pieces if any(True for _ in piece.parameters())]
    for pattern, kind in (cuts or {}).items():
        _override(family, model, pattern, kind)
    return family


def _override(family: ModelFamily, model: nn.Module, pattern: str, kind: str) -> None:
    if kind not in KINDS:
        raise UnfitError(f'cuts: "{pattern}" is to be cut by "{kind}"; known are {", ".join(KINDS)}')
    paths = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
    if not paths:
        raise UnfitError(f'cuts: no module of {type(model).__name__} is called "{pattern}"')
    family.cuts |= dict.fromkeys(paths, kind)


# ---- any model ----


def _by_names(model: nn.Module) -> ModelFamily:
    """Pieces of an nn.Sequential are its children; units are the entries of the outermost containers."""
    pieces = list(model.children()) if isinstance(model, nn.Sequential) else []
    family = ModelFamily("sequential" if pieces else "any module", pieces, list(entries(model)))
    family.proved = _is_chain(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            family.cuts |= _pairs(path, module)
        elif isinstance(module, nn.Linear) and COLUMN.search(path):
            family.cuts[path] = "column"
        elif isinstance(module, nn.Linear) and ROW.search(path):
            family.cuts[path] = "row"
    return family


def _is_chain(model: nn.Module) -> bool:
    """Whether nothing but `nn.Sequential`s runs the modules, each of them once."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    chains = {path for path, module in model.named_modules() if type(module) is nn.Sequential}
    above = [
        path.rpartition(".")[0] for path, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    return (
        type(model) is nn.Sequential
        and len(paths) == len(list(model.modules()))
        and all(place in chains for place in above)
        and all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    )


def _has_only(model: nn.Module, names: str) -> bool:
    """Whether the modules are PyTorch's and Hugging Face's own, and no parameter has another name."""
    known = ("torch.nn.modules.", "transformers.", SplitColumns.__module__)
    return all(re.fullmatch(names, name) for name, _ in model.named_parameters()) and all(
        type(module).__module__.startswith(known) for module in model.modules()
    )


def entries(module: nn.Module) -> list[nn.Module]:
    """Return the entries with parameters of the outermost `nn.Sequential`s and `nn.ModuleList`s.

    Of an entry that nothing can call, such as a list of layers in a list, its own entries.
    """
    if isinstance(module, (nn.Sequential, nn.ModuleList)):
        return [called for child in module for called in _called(child)]
    return [entry for child in module.children() for entry in entries(child)]


def writes_input(module: nn.Module) -> bool:
    """Whether a module begins with an activation in place, by the order of `nn.Sequential`s.

    Its input is then also what it leaves there: it is no unit, whose input is another tensor.
    """
    first = next(module.children(), None)
    if isinstance(first, nn.Sequential):
        return writes_input(first)
    return isinstance(module, nn.Sequential) and bool(getattr(first, "inplace", False))


def _called(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is nn.Module.forward:
        return [called for child in module.children() for called in _called(child)]
    return [module] if any(True for _ in module.parameters()) and not writes_input(module) else []


def _pairs(path: str, module: nn.Sequential) -> dict[str, str]:
    """Linear layers with only elementwise functions between them: column, row, column, row."""
    cuts: dict[str, str] = {}
    column = None
    for name, child in module.named_children():
        here = f"{path}.{name}".lstrip(".")
        if isinstance(child, nn.Linear):
            if column is None:
                column = here
            else:
                cuts |= {column: "column", here: "row"}
                column = None
        elif not isinstance(child, ELEMENTWISE):
            column = None
    return cuts


# ---- Hugging Face ----


def _logits(output: Any) -> Tensor:
    value: Tensor = output.logits
    return value


def _first(output: Any) -> Tensor:
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


def _no_pieces(model: Any) -> str:
    """Why pieces would compute something else; empty: they do not."""
    kind, config = getattr(model.config, "_attn_implementation", "sdpa"), model.config
    if kind != "sdpa":
        return (
            f"{type(model).__name__} computes attention by {kind!r}, which takes its causal mask from the "
            'model; pieces have none. Make the model with attn_implementation="sdpa"'
        )
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        return (
            f"{type(model).__name__} has a sliding window, which pieces cannot carry; set "
            "config.sliding_window=None"
        )
    return ""


class GPT2Embed(nn.Module):
    """Tokens and positions of a GPT-2."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop

    def forward(self, tokens: Tensor) -> Tensor:
        wte: Any = self.wte
        wpe: Any = self.wpe
        hidden: Tensor = self.drop(wte(tokens) + wpe(torch.arange(tokens.shape[-1], device=tokens.device)))
        return hidden


class DecoderBlock(nn.Module):
    """A decoder layer that needs nothing but the hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return _first(self.layer(hidden))


class RotaryDecoderBlock(DecoderBlock):
    """A decoder layer that also takes rotary positions, which each stage computes for itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__(layer)
        self.rotary = rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotation = self.rotary(hidden, position_ids=positions)
        return _first(self.layer(hidden, position_embeddings=rotation, position_ids=positions))


def _is_fused(module: nn.Module) -> bool:
    """Whether it is GPT-2's own layer: one with an adapter has another result."""
    return type(module).__name__ == "Conv1D" and set(dict(module.named_parameters())) == {"weight", "bias"}


def _gpt2(model: Any) -> ModelFamily:
    body = model.transformer
    for block in body.h:
        if _is_fused(block.attn.c_attn):
            width = block.attn.c_attn.weight.shape[0]
            block.attn.c_attn = SplitColumns(block.attn.c_attn, [width] * 3)
    cuts = {"transformer.wte": "vocabulary", "lm_head": "column, gathered"}
    for index in range(len(body.h)):
        at = f"transformer.h.{index}"
        if isinstance(body.h[index].attn.c_attn, SplitColumns):
            cuts |= {f"{at}.attn.c_attn.{name}": "column" for name in "qkv"}
        else:
            cuts[f"{at}.attn.c_attn"] = "unknown"
        cuts |= {f"{at}.attn.c_proj": "row", f"{at}.mlp.c_fc": "column", f"{at}.mlp.c_proj": "row"}

    def localize(tensor: int) -> None:
        _check_heads(model, model.config.n_head, tensor)
        for block in body.h:
            block.attn.split_size //= tensor
            if _is_fused(block.mlp.c_fc):
                block.mlp.c_fc.nf //= tensor  # the width of its output, by which it views it

    pieces = [GPT2Embed(body), *map(DecoderBlock, body.h), nn.Sequential(body.ln_f, model.lm_head)]
    proved = _has_only(model, GPT2)
    return ModelFamily("GPT-2", pieces, list(body.h), cuts, _logits, localize, proved, _no_pieces(model))


def _llama(model: Any) -> ModelFamily:
    body, config = model.model, model.config
    cuts = {"model.embed_tokens": "vocabulary", "lm_head": "column, gathered"}
    for index in range(len(body.layers)):
        at = f"model.layers.{index}"
        cuts |= {f"{at}.self_attn.{x}_proj": "column" for x in "qkv"} | {f"{at}.self_attn.o_proj": "row"}
        cuts |= {f"{at}.mlp.{x}_proj": "column" for x in ("gate", "up")} | {f"{at}.mlp.down_proj": "row"}

    def localize(tensor: int) -> None:
        _check_heads(model, config.num_attention_heads, tensor)
        _check_heads(model, config.num_key_value_heads, tensor)

    blocks = [RotaryDecoderBlock(layer, body.rotary_emb) for layer in body.layers]
    pieces = [body.embed_tokens, *blocks, nn.Sequential(body.norm, model.lm_head)]
    proved = _has_only(model, LLAMA)
    return ModelFamily("Llama", pieces, list(body.layers), cuts, _logits, localize, proved, _no_pieces(model))


def _check_heads(model: nn.Module, heads: int, tensor: int) -> None:
    if heads % tensor:
        raise UnfitError(
            f"{type(model).__name__} has {heads} attention heads, which tensor={tensor} does not divide"
        )
