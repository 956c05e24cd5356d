"""Attention that sees some positions only, with cut sequences, against one process. On two ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention

import unisono.parallel as up
from parallel import sweep
from parallel.combined_axes import same
from parallel.contexts import WORDS, mean
from parallel.run_features import in_group

ROWS, TIME, WIDTH, HEADS = 2, 20, 16, 4
Sees = Callable[..., Tensor]


class Seeing(nn.Module):
    """Two layers of attention by `sees(model, q, k, v, **inputs)`. Shapes: q [rows, heads, time, size]."""

    def __init__(self, sees: Sees) -> None:
        super().__init__()
        self.sees = sees
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.distances, self.sinks = nn.Embedding(2 * TIME, HEADS), nn.Parameter(torch.randn(HEADS))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, ids: Tensor, **more: Tensor) -> Tensor:
        places = more.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
        x = self.words(ids) + self.places(places)
        for _ in range(2):
            q, k, v = map(self.heads, self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(self.sees(self, q, k, v, **more).transpose(1, 2).flatten(2))
        return x @ self.words.weight.T


def causal() -> Tensor:
    return torch.ones(TIME, TIME, dtype=torch.bool).tril()


def apart() -> Tensor:
    at = torch.arange(TIME)
    return at[:, None] - at


def window(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal() & (apart() < 4))


def window_and_first(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal() & ((apart() < 4) | (torch.arange(TIME) < 2)))


def chunks(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chunk = torch.arange(TIME) // 8
    return attention(q, k, v, causal() & (chunk[:, None] == chunk))


def packed(_: Any, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
    text = (position_ids == 0).cumsum(-1)
    return attention(q, k, v, causal() & (text[:, None, :, None] == text[:, None, None, :]))


def bounded(_: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    text = (torch.arange(TIME)[None, :, None] >= cu_seqlens[:, None, :]).sum(-1)
    return attention(q, k, v, causal() & (text[:, None, :, None] == text[:, None, None, :]))


def given(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, mask)


def learned_distances(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = model.distances(apart() + TIME).permute(2, 0, 1)
    return attention(q, k, v, bias.masked_fill(~causal(), -1e9))


def slopes(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = -apart().abs() * 2.0 ** -torch.arange(HEADS)[:, None, None]
    return attention(q, k, v, bias.masked_fill(~causal(), -torch.inf))


def sink_scores(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~causal(), -1e9)
    scores = torch.cat([scores, model.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def sink_keys(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A learned key before all positions, and two after them."""
    key = model.sinks[:, None, None].expand(len(q), -1, 1, q.shape[-1])
    k, v = torch.cat([key, k, key, 2 * key], 2), torch.cat([key * 0, v, key, -key], 2)
    return attention(q, k, v, functional.pad(causal(), (1, 2), value=True))


def first_queries(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    key = model.sinks[:, None, None].expand(len(q), -1, 2, q.shape[-1])
    q, k, v = (torch.cat([key, each], 2) for each in (q, k, v))
    return attention(q, k, v, is_causal=True)[:, :, 2:]


def across(model: Any, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
    _, k, v = map(model.heads, model.qkv(model.norm(model.words(memory))).chunk(3, -1))
    return attention(q, k, v, padding[:, None, None, :])


def inputs() -> dict[Sees, dict[str, Tensor]]:
    """Everything that attends -> what its model gets beside ids."""
    generator = torch.Generator().manual_seed(4)
    begins = torch.tensor([[0, 7, 16], [0, 3, 4]])
    restarts = torch.arange(TIME).expand(ROWS, -1).clone()
    for row, bounds in enumerate(begins.tolist()):
        for begin in bounds:
            restarts[row, begin:] = torch.arange(TIME - begin)
    alone: tuple[Sees, ...] = (
        window, window_and_first, chunks, learned_distances, slopes, sink_scores, sink_keys, first_queries,
    )  # fmt: skip
    return {sees: {} for sees in alone} | {
        packed: {"position_ids": restarts},
        bounded: {"cu_seqlens": begins},
        given: {"mask": torch.randn(ROWS, 1, TIME, TIME, generator=generator)},
        across: {
            "memory": torch.randint(WORDS, (ROWS, 11), generator=generator),
            "padding": torch.arange(11) < torch.tensor([[11], [5]]),
        },
    }


def check_attention_that_sees_some_positions(folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(WORDS, (4, 2, ROWS, TIME), generator=generator)
    for sees, more in inputs().items():
        batches = [({"ids": x, **more}, y) for x, y in ids]
        for plan in (up.Plan(context=2), up.Plan(context=2, zero=3, recompute=True)):
            same(plan, partial(Seeing, sees), batches, mean, weigh="rows", rate=0.05)


def check_hugging_faces_windows_and_packed_texts(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    import transformers

    sizes = {
        "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        "use_cache": False,  # with a cache one process does not look for texts that are packed
    }  # fmt: skip

    def mistral() -> nn.Module:
        config = transformers.MistralConfig(**sizes, sliding_window=4)
        return transformers.MistralForCausalLM(config)

    def llama() -> nn.Module:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    ids = torch.randint(1, WORDS, (4, 2, ROWS, TIME), generator=torch.Generator().manual_seed(5))
    padding = (torch.arange(TIME) < torch.tensor([[TIME], [13]])).long()
    kinds = inputs()
    for make, more in (
        (mistral, {}),
        (mistral, {"attention_mask": padding}),
        (llama, kinds[packed]),
        (llama, {"attention_mask": kinds[given]["mask"].masked_fill(~causal(), -1e9)}),
    ):
        batches = [({"input_ids": x, **more}, y) for x, y in ids]
        same(up.Plan(context=2), make, batches, mean, weigh="rows", rate=0.05)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
