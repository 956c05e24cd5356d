"""The shape of a model from its Hugging Face config file. Nothing is downloaded, no weights are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from unisono.engine.base.validation import instance, whole
from unisono.networks.toml import tables_of, text_of
from unisono.planner.shape import ExpertShape, LatentShape, TransformerShape, shape_of

MOST_BYTES = 1 << 20
NAMED = Path(__file__).parent / "models.toml"
ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "t5",
    "mt5",
    "umt5",
    "bart",
    "mbart",
    "whisper",
    "vit",
)
UNPLANNED = ("attention_bias", "mlp_bias", "add_cross_attention", "qk_layernorm", "attn_output_gate")
OWN_MODEL = "unisono.parallel.plan chooses for any other model of PyTorch"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "positions": "n_positions",
}
USUAL = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}


HEAD = {"head_size": "head_dim"}


class ModelType(NamedTuple):
    """What the models of a `model_type` have in common."""

    fields: dict[str, Any]  # of `TransformerShape`
    keys: Mapping[str, str] = MappingProxyType(USUAL)  # of the config, by field; all have to be there
    # The same, where null and absence mean 0.
    optional: Mapping[str, str] = MappingProxyType({"kv_heads": "num_key_value_heads", **HEAD})
    tied: bool = False  # what `tie_word_embeddings` is where it is absent
    windowed: bool = False  # `sliding_window` counts, unless `use_sliding_window` is false


GROUPED = {**USUAL, "kv_heads": "num_key_value_heads"}
"""Where the heads of keys are no number, Hugging Face takes one that is not that of all heads."""

HEADS_GIVEN = {**GROUPED, "head_size": "head_dim"}
LLAMA: dict[str, Any] = {"family": "llama"}
NEOX: dict[str, Any] = {"family": "gpt", "dropout": False, "attention": "fused"}

MODEL_TYPES = {
    "gpt2": ModelType({}, GPT2, {"ffn": "n_inner"}, tied=True),
    "gpt_neox": ModelType(NEOX, USUAL, {}),
    "phi": ModelType({**NEOX, "norms": 1, "output_bias": True}, USUAL, {"kv_heads": "num_key_value_heads"}),
    "phi3": ModelType(LLAMA, windowed=True),
    "llama": ModelType(LLAMA),
    "mistral": ModelType(LLAMA, GROUPED, HEAD, windowed=True),
    "mixtral": ModelType(LLAMA, GROUPED, HEAD, windowed=True),
    "qwen2": ModelType({**LLAMA, "biases": "heads"}, GROUPED, HEAD),
    "qwen2_moe": ModelType({**LLAMA, "biases": "heads"}, GROUPED, HEAD),
    "qwen3": ModelType({**LLAMA, "head_norms": True}, HEADS_GIVEN, {}),
    "qwen3_moe": ModelType({**LLAMA, "head_norms": True}, GROUPED, HEAD),
    "gemma": ModelType(LLAMA, HEADS_GIVEN, {}, tied=True),
    "gemma2": ModelType({**LLAMA, "norms": 4}, HEADS_GIVEN, {}, tied=True, windowed=True),
    "gemma3_text": ModelType(
        {**LLAMA, "norms": 4, "head_norms": True}, HEADS_GIVEN, {}, tied=True, windowed=True
    ),
    "deepseek_v2": ModelType(LLAMA, USUAL, {}),
    "deepseek_v3": ModelType(LLAMA, USUAL, {}),
}
MIXTRAL = {"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"}
QWEN_MOE = {"count": "num_experts", "top_k": "num_experts_per_tok", "ffn": "moe_intermediate_size"}
DEEPSEEK = {
    "count": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "dense_layers": "first_k_dense_replace",
}
LATENT = {"key_rank": "kv_lora_rank", "rotary": "qk_rope_head_dim", "value": "v_head_dim"}


def named_models() -> dict[str, dict[str, Any]]:
    """The configs that are shipped, by name."""
    return tables_of(text_of(NAMED), str(NAMED))


def read_shape(file: str | Path, sequence: int | None = None, **changes: Any) -> TransformerShape:
    """The shape of a config.json, of the one in a folder, or of a model that is shipped (`named_models`).

    A text that contains a / or ends in .json is a file; others are names, or else folders.

    Args:
        sequence: tokens of a sequence; None: as many as a table of positions has rows, where there is one.
        changes: fields of `TransformerShape` that differ, such as attention="fused".
    Raises:
        OSError: the file cannot be read.
        ValueError: its model_type is none of `MODEL_TYPES`, or it lacks a number; no such name.
    """
    instance(file, (str, Path), "file")
    named = named_models()
    if isinstance(file, str) and file not in named and Path(file).is_dir():
        file = Path(file)
    if isinstance(file, Path) or "/" in file or file.endswith(".json"):
        file = Path(file)
        if file.is_dir():
            file = file / "config.json"
        config = _read(file)
    else:
        if file not in named:
            raise ValueError(f"no model {file!r}: expected a config.json, or one of {', '.join(named)}")
        config = named[file]
    try:
        fields = _fields(config)
        if sequence is not None:
            fields["sequence"] = sequence
        if "sequence" not in fields:
            raise ValueError("says no length of a sequence: give --sequence")
        _check_window(config, whole(fields["sequence"], "sequence"))
        return shape_of(**{**fields, **changes})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: is a {type(config).__name__}, expected an object")
    return config


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    name = config.get("model_type")
    if name in ENCODERS or config.get("is_encoder_decoder"):
        raise ValueError(f"model_type is {name!r}: only decoders are planned, no encoders. {OWN_MODEL}")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise ValueError(f"model_type is {name!r}, expected one of {', '.join(MODEL_TYPES)}. {OWN_MODEL}")
    kind = MODEL_TYPES[name]
    unknown = [*UNPLANNED, *([] if name in EXPERT_READERS else EXPERTS)]
    for key in unknown:
        if config.get(key) and not (key == "attention_bias" and name == "gpt_neox"):
            raise ValueError(f"{key}={config[key]!r} is not planned")
    if name == "gpt_neox" and not config.get("attention_bias", True):
        raise ValueError("attention_bias=False of a gpt_neox is not planned")
    found: dict[str, Any] = {**kind.fields, **_numbers(config, kind.keys)}
    found |= {field: config.get(key) or 0 for field, key in kind.optional.items()}
    found["tied"] = config.get("tie_word_embeddings", kind.tied)
    if name == "gpt2":
        found["sequence"] = found["positions"]
    if name in EXPERT_READERS:
        found["experts"] = EXPERT_READERS[name](config)
    if name.startswith("deepseek"):
        found |= _latent(config)
    return found


def _numbers(config: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    for key in keys.values():
        if key not in config:
            raise ValueError(f"lacks {key}")
    least = {"first_k_dense_replace": 0, "qk_rope_head_dim": 0}
    return {field: whole(config[key], key, least.get(key, 1)) for field, key in keys.items()}


def _qwen_moe(config: dict[str, Any]) -> ExpertShape:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError(
            "decoder_sparse_step and mlp_only_layers: layers in between without experts are not planned"
        )
    shared = config.get("shared_expert_intermediate_size") or 0
    if "num_experts" not in config and "num_local_experts" in config:  # as transformers 5 writes it
        config = {**config, "num_experts": config["num_local_experts"]}
    if config["model_type"] == "qwen2_moe" and not shared:
        raise ValueError("lacks shared_expert_intermediate_size")
    numbers = _numbers(config, QWEN_MOE)
    return ExpertShape(**numbers, shared_ffn=shared, shared_gate=bool(shared))


def _deepseek(config: dict[str, Any]) -> ExpertShape:
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"moe_layer_freq={config['moe_layer_freq']!r} is not planned")
    numbers = _numbers(config, DEEPSEEK)
    shared = whole(config.get("n_shared_experts") or 0, "n_shared_experts", 0)
    return ExpertShape(**numbers, shared_ffn=shared * numbers["ffn"])


EXPERT_READERS = {
    "mixtral": lambda config: ExpertShape(**_numbers(config, MIXTRAL)),
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    numbers = _numbers(config, {**LATENT, "plain": "qk_nope_head_dim"})
    plain = numbers.pop("plain")
    latent = LatentShape(**numbers, query_rank=whole(config.get("q_lora_rank") or 0, "q_lora_rank", 0))
    return {"latent": latent, "head_size": plain + latent.rotary}


def _check_window(config: dict[str, Any], sequence: int) -> None:
    """Attention to a window of the sequence has fewer scores than are priced."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", MODEL_TYPES[config["model_type"]].windowed)
    if used and window is not None and whole(window, "sliding_window", 1) < sequence:
        raise ValueError(f"sliding_window={window} is shorter than the sequence, {sequence}: not planned")
