"""Dry runs of Hugging Face's decoders, which look for packed texts and may keep keys and values."""

from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import DryRun, TrainingTask
from planned_models import LENGTH, WORDS, adamw, ids, measured, tokens_loss

pytest.importorskip("transformers")


def decoder(heads: int = 4) -> nn.Module:
    """Llama with one head of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))


def test_a_decoder_keeps_no_keys() -> None:
    model, sample = decoder(), ids(8)
    (peak,) = DryRun(TrainingTask(model, sample, 8, adamw, tokens_loss), up.Plan()).peaks()
    model.config.use_cache = False  # as a run has it
    seen = measured(model, lambda output, targets: tokens_loss(output.logits, targets), sample)
    assert abs(peak.nbytes - seen) <= 512


def test_a_decoder_with_one_head_of_keys_is_cut() -> None:
    sample = ids(8)
    task = TrainingTask(decoder(), sample, 8, adamw, tokens_loss)
    whole, cut, again = (
        DryRun(task, up.Plan(**each)).peaks()[0].parts["activations"]
        for each in ({}, {"tensor": 2}, {"tensor": 2, "recompute": True})
    )
    assert again < cut < whole


def test_positions_of_packed_texts_make_a_mask() -> None:
    positions = torch.arange(LENGTH) % (LENGTH // 2)
    tokens, targets = ids(8)
    packed = {"input_ids": tokens, "position_ids": positions.expand(8, -1).clone()}
    model = decoder()
    alone, masked = (
        DryRun(TrainingTask(model, (given, targets), 8, adamw, tokens_loss), up.Plan()).peaks()[0].nbytes
        for given in ({"input_ids": tokens}, packed)
    )
    assert masked > alone + 8 * LENGTH * LENGTH
