"""The shape of a model from its Hugging Face config file. Nothing is downloaded, no weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.engine.base.validation import instance, whole
from unisono.networks.toml import tables_of, text_of
from unisono.planner.shape import TransformerShape, shape_of

__all__ = ["named_models", "read_shape"]

MOST_BYTES = 1 << 20
NAMED = Path(__file__).parent / "models.toml"
KINDS = ("gpt2", "llama", "mistral", "qwen2")
UNPLANNED = ("attention_bias", "mlp_bias", "add_cross_attention", "num_local_experts", "num_experts")

GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "positions": "n_positions",
}
LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
}


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
        ValueError: it is no config of a gpt2, llama, mistral or qwen2, or lacks a number; no such name.
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
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r}, expected one of {', '.join(KINDS)}")
    keys = GPT2 if kind == "gpt2" else LLAMA
    for key in keys.values():
        if key not in config:
            raise ValueError(f"lacks {key}")
    for key in UNPLANNED:
        if config.get(key):
            raise ValueError(f"{key}={config[key]!r} is not planned")
    found = {field: whole(config[key], key, 1) for field, key in keys.items()}
    if kind == "gpt2":
        tied = config.get("tie_word_embeddings", True)
        return {**found, "ffn": config.get("n_inner") or 0, "sequence": found["positions"], "tied": tied}
    if kind != "llama" and "num_key_value_heads" not in config:
        raise ValueError("lacks num_key_value_heads")  # their defaults are numbers, not num_attention_heads
    return {
        **found,
        "family": "llama",
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_size": config.get("head_dim") or 0,
        "tied": config.get("tie_word_embeddings", False),
        "biases": "heads" if kind == "qwen2" else "none",
    }


def _check_window(config: dict[str, Any], sequence: int) -> None:
    """Attention to a window of the sequence has fewer scores than are priced."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if used and window is not None and whole(window, "sliding_window", 1) < sequence:
        raise ValueError(f"sliding_window={window} is shorter than the sequence, {sequence}: not planned")
