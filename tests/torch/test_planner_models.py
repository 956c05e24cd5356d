"""Parameters that the planner counts from a config, beside those of Hugging Face's model of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inside_planner import MODEL_TYPES, named_models, read_shape
from loops import each

transformers = pytest.importorskip("transformers")

TINY = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 48, "vocab_size": 131},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 64},
    "gemma3_text": {"head_dim": 32, "sliding_window": 64},
    "deepseek_v2": {
        "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 2, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def parameters_of(config: dict[str, Any]) -> int:
    """Those of the model on the meta device."""
    kind = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind)
    return sum(parameter.numel() for parameter in model.parameters())


@each("kind", list(MODEL_TYPES))
@each("tied", [False, True])
def test_parameters_are_those_of_the_model(kind: str, tied: bool, tmp_path: Path) -> None:
    if kind == "phi" and tied:
        return  # its output has a bias, which the table has not
    config = {**({} if kind == "gpt2" else TINY), **MORE.get(kind, {}), "model_type": kind}
    config["tie_word_embeddings"] = tied
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path, 48).parameters == parameters_of(config)


@pytest.mark.sweep
@each("name", list(named_models()))
def test_named_models_are_those_of_hugging_face(name: str) -> None:
    assert read_shape(name, 1024).parameters == parameters_of(named_models()[name])
