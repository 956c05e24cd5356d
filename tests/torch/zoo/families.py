"""Further families of Hugging Face, which were added after the rules: what a user may bring."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .animal import (
    EXPERTS,
    HEADS,
    ROWS,
    STILL,
    TIME,
    WIDTH,
    WORDS,
    Animal,
    causal,
    class_loss,
    hugging_face,
    image,
    masked,
    seq2seq,
    text,
    token_loss,
)

OTHER_NAMES = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "max_position_embeddings")
)  # fmt: skip
"""For configurations with names of their own, or of images."""


def pixels(name: str, **more: Any) -> Animal:
    made = hugging_face(
        f"{name}ForImageClassification", f"{name}Config", **OTHER_NAMES | {"num_labels": 4} | more
    )
    return Animal(made, lambda g: image(g, 16), class_loss)


def forecast_loss(output: Any, targets: Tensor) -> Tensor:
    return functional.mse_loss(output.prediction_outputs, targets)


FAMILIES: dict[str, Animal] = {
    "gptj": causal(
        "GPTJ",
        **OTHER_NAMES
        | {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 16,
           "rotary_dim": 4},
    ),
    "gemma2": causal("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gpt-oss": causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "mamba2": causal(
        "Mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4, num_attention_heads=None,
        num_key_value_heads=None,
    ),
    "rwkv": causal(
        "Rwkv", context_length=TIME, attention_hidden_size=WIDTH, num_attention_heads=None,
        num_key_value_heads=None, max_position_embeddings=None,
    ),
    "lfm2": causal("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "qwen3-next": causal(
        "Qwen3Next", head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16, **EXPERTS,
    ),
    "modernbert": Animal(
        hugging_face(
            "ModernBertForMaskedLM", "ModernBertConfig", num_key_value_heads=None, local_attention=4,
            layer_types=["full_attention", "sliding_attention"], cls_token_id=1, sep_token_id=1,
        ),
        masked,
        token_loss,
    ),
    "deberta-v2": Animal(
        hugging_face(
            "DebertaV2ForMaskedLM", "DebertaV2Config", num_key_value_heads=None, relative_attention=True,
            position_buckets=4, pos_att_type=["p2c", "c2p"], **STILL,
        ),
        masked,
        token_loss,
    ),
    "xlnet": Animal(
        hugging_face(
            "XLNetLMHeadModel", "XLNetConfig",
            **OTHER_NAMES
            | {"vocab_size": WORDS, "d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 48,
               "dropout": 0.0},
        ),
        text,
        token_loss,
    ),
    "switch": Animal(
        hugging_face(
            "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
            **OTHER_NAMES
            | {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2,
               "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
               "num_heads": HEADS, "num_experts": 4, "router_jitter_noise": 0.0, "dropout_rate": 0.0,
               "decoder_start_token_id": 0},
        ),
        seq2seq,
        token_loss,
    ),
    "convnext": pixels("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
    "segformer": pixels(
        "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
        patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    ),
    "dinov2": pixels(
        "Dinov2", image_size=16, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        mlp_ratio=2, patch_size=4,
    ),
    "patchtst": Animal(
        hugging_face(
            "PatchTSTForPrediction", "PatchTSTConfig",
            **OTHER_NAMES
            | {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
               "num_hidden_layers": 2, "d_model": WIDTH, "num_attention_heads": HEADS, "ffn_dim": 48,
               "norm_type": "layernorm", "prediction_length": 4, "loss": "mse"},
        ),
        lambda g: (torch.randn(ROWS, 16, 2, generator=g), torch.randn(ROWS, 4, 2, generator=g)),
        forecast_loss,
    ),
}  # fmt: skip
