"""Models whose names fit the rules and whose code does not: each is refused by name, or trained right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models, sweep
from parallel.plain_training import adamw, same, under
from parallel.run_features import in_group
from unisono.parallel import cut_check

WIDTH, HEADS = models.WIDTH, models.HEADS
TENSOR = up.Plan(tensor=2)


class Mlp(nn.Module):
    """What is between its two layers mixes features, or has a parameter that all ranks hold."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)
        self.between = between
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.between == "softmax":
            x = x.softmax(-1)
        elif self.between == "parameter":
            x = torch.tanh(x * self.scale)
        return self.fc2(x) * (1.0 if self.between == "parameter" else self.scale)


class Attention(nn.Module):
    """Multi-head or multi-query attention; `fixed`: the number of heads is written, their width follows."""

    def __init__(self, *, fixed: bool = False, one_key: bool = False) -> None:
        super().__init__()
        keys = WIDTH // HEADS if one_key else WIDTH
        self.query, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.shape = (HEADS, -1) if fixed else (-1, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, self.shape).transpose(1, 2)
        shape = (1, -1) if self.key.out_features != WIDTH else self.shape
        k, v = (layer(x).unflatten(-1, shape).transpose(1, 2) for layer in (self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return x + self.out_proj(mixed.transpose(1, 2).flatten(2))


class Thrice(nn.Module):
    """One block, three times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))


def text(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(models.Embed(), *blocks, nn.Linear(WIDTH, models.VOCABULARY))


def refused(make: Any, batches: Any, loss: Any, says: str, **more: Any) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        under(TENSOR, make, batches, loss, **more)
    print(caught.value, flush=True)


def check_what_mixes_features_between_two_cut_layers_is_refused(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    for between, says in (
        ("softmax", r'In "fc2" \(Linear\), its output differs'),
        ("parameter", "In Mlp, the gradient of scale differs"),
    ):
        refused(lambda b=between: Mlp(b), batches, functional.cross_entropy, f"{says}.*Leave out tensor=2")
    same(TENSOR, lambda: Mlp("nothing"), batches, functional.cross_entropy)


def check_heads_of_a_written_number_are_refused(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    refused(
        lambda: text(Attention(fixed=True), models.Block()),
        batches,
        models.token_loss,
        r'"1\.out_proj" .*cuts=\{"1\.\*": "whole"\}',
    )
    remedy = {"1.*": "whole"}
    same(TENSOR, lambda: text(Attention(fixed=True), models.Block()), batches, models.token_loss, cuts=remedy)
    same(TENSOR, lambda: text(Attention(), models.Block()), batches, models.token_loss)


def check_a_block_that_is_used_three_times(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    same(TENSOR, lambda: text(Thrice(models.Block())), batches, models.token_loss)
    refused(lambda: text(Thrice(Attention(fixed=True))), batches, models.token_loss, '"1.block')

    def thrice(block: nn.Module) -> nn.Module:
        return text(block, block, block)

    same(TENSOR, lambda: thrice(models.Block()), batches, models.token_loss)
    refused(lambda: thrice(Attention(fixed=True)), batches, models.token_loss, '"1')

    def around() -> nn.Module:
        layer = nn.Linear(16, 16)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), layer)

    refused(
        around, models.vector_batches(4, 8), functional.cross_entropy, "tensor=2 does not train Sequential"
    )


def check_multi_query_attention_cut_by_hand_is_refused(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    by_hand = {"1.query": "column", "1.out_proj": "row", "1.key": "whole", "1.value": "whole"}
    refused(
        lambda: text(Attention(one_key=True)),
        batches,
        models.token_loss,
        r'In "1\.(key|value)"',
        cuts=by_hand,
    )


def hugging_face(name: str, **more: Any) -> Any:
    import transformers

    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=models.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=models.TIME,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config)


class Logits(nn.Module):
    """A model of Hugging Face that returns its logits."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def check_norms_of_single_heads_are_refused(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(6, 4)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for name, more in (("Qwen3", {}), ("Gemma3", {}), ("Qwen3Moe", experts)):
        make = hugging_face(name, head_dim=8, **more)
        remedy = r'Write cuts=\{"inner\.model\.layers\.\*\.self_attn\.\*": "whole"\}'
        if name == "Qwen3Moe":  # no name says how to cut its experts
            refused(lambda m=make: Logits(m), batches, models.token_loss, "(q|k)_norm.*Leave out tensor=2")
            continue
        refused(lambda m=make: Logits(m), batches, models.token_loss, f"(q|k)_norm.*{remedy}")
        whole = {"inner.model.layers.*.self_attn.*": "whole"}
        same(TENSOR, lambda m=make: Logits(m), batches, models.token_loss, cuts=whole)


def check_hugging_face_models_that_the_rules_know(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(6, 4)
    for make in (
        models.gpt2, models.llama, hugging_face("Llama", tie_word_embeddings=True), hugging_face("Qwen2"),
        hugging_face("Mistral", sliding_window=None),
    ):  # fmt: skip
        for plan in (TENSOR, up.Plan(tensor=2, zero=1)):
            same(plan, make, batches, models.token_loss)


def check_large_models_need_a_proof_or_a_word(folder: Path) -> None:
    batches, vectors = models.text_batches(2, 4), models.vector_batches(2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_check, "LIMIT_BYTES", 0)
        with pytest.raises(ValueError, match=r"nothing proves that Sequential .*check=True.*check=False"):
            under(TENSOR, models.gpt, batches, models.token_loss)
        same(TENSOR, models.gpt, batches, models.token_loss, check=True)
        same(TENSOR, models.gpt, batches, models.token_loss, check=False)
        patch.setattr(cut_check.CutCheck, "run", None)  # these are proved
        same(TENSOR, models.mlp, vectors, functional.cross_entropy)
        if sweep.HAVE_TRANSFORMERS:
            for make in (models.gpt2, models.llama, hugging_face("Qwen2")):
                same(TENSOR, make, batches, models.token_loss)
            for change in (_with_norm, _with_another_layer):
                with pytest.raises(ValueError, match="nothing proves that LlamaForCausalLM"):
                    under(TENSOR, lambda c=change: c(models.llama()), batches, models.token_loss)


def _with_norm(model: Any) -> Any:
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    return model


def _with_another_layer(model: Any) -> Any:
    model.model.layers[1].mlp.act_fn = Thrice(nn.Tanh())
    return model


def check_ranks_of_a_tensor_group_need_the_same_rows(folder: Path) -> None:
    run = up.parallelize(models.gpt(), TENSOR, optimizer=adamw, loss=models.token_loss)
    with pytest.raises(ValueError, match=r"give different rows.*run\.shard"):
        run.step(models.text_batches(2, 4)[dist.get_rank()])
    run.step(models.text_batches(2, 4)[0])


def check_a_model_that_cannot_be_copied(folder: Path) -> None:
    def make() -> nn.Module:
        model = models.gpt()
        model.lock = threading.Lock()
        return model

    with pytest.raises(ValueError, match=r"Sequential cannot be copied .*check=False"):
        under(TENSOR, make, models.text_batches(2, 4), models.token_loss)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
