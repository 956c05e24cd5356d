"""Attention that sees some positions only, with cut sequences, against one process. On two ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention

import unisono.parallel as up
from parallel import sweep
from parallel.contexts import WORDS, mean
from parallel.plain_training import sgd
from parallel.rows import Row

ROWS_OF_IDS, TIME, WIDTH, HEADS = 2, 20, 16, 4
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
    restarts = torch.arange(TIME).expand(ROWS_OF_IDS, -1).clone()
    for row, bounds in enumerate(begins.tolist()):
        for begin in bounds:
            restarts[row, begin:] = torch.arange(TIME - begin)
    alone: tuple[Sees, ...] = (
        window, window_and_first, chunks, learned_distances, slopes, sink_scores, sink_keys, first_queries,
    )  # fmt: skip
    return {sees: {} for sees in alone} | {
        packed: {"position_ids": restarts},
        bounded: {"cu_seqlens": begins},
        given: {"mask": torch.randn(ROWS_OF_IDS, 1, TIME, TIME, generator=generator)},
        across: {
            "memory": torch.randint(WORDS, (ROWS_OF_IDS, 11), generator=generator),
            "padding": torch.arange(11) < torch.tensor([[11], [5]]),
        },
    }


GENERATOR = torch.Generator().manual_seed(5)
IDS = torch.randint(WORDS, (4, 2, ROWS_OF_IDS, TIME), generator=GENERATOR)
PLANS = (up.Plan(context=2), up.Plan(context=2, zero=3, recompute=True))
SLOW = {"optimizer": partial(sgd, rate=0.05), "weigh": "rows"}


def row(make: Any, plans: Any, given: Any) -> Row:
    return Row(make, plans, given=given, loss=mean, sample=None, options=SLOW, compare={"state": True})


def of_hugging_face() -> dict[str, Row]:
    sizes = {
        "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        "use_cache": False,  # with a cache one process does not look for texts that are packed
    }  # fmt: skip

    def made(name: str, **more: Any) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    mistral, llama = partial(made, "Mistral", sliding_window=4), partial(made, "Llama")
    ids = torch.randint(1, WORDS, (4, 2, ROWS_OF_IDS, TIME), generator=torch.Generator().manual_seed(5))
    padding = (torch.arange(TIME) < torch.tensor([[TIME], [13]])).long()
    masked = KINDS[given]["mask"].masked_fill(~causal(), -1e9)
    return {
        name: row(make, PLANS[:1], [({"input_ids": x, **more}, y) for x, y in ids])
        for name, make, more in (
            ("a window of Mistral", mistral, {}),
            ("a window of Mistral, padded", mistral, {"attention_mask": padding}),
            ("packed texts of Llama", llama, KINDS[packed]),
            ("a mask of Llama", llama, {"attention_mask": masked}),
        )
    }


KINDS = inputs()
TABLE = {
    sees.__name__: row(partial(Seeing, sees), PLANS, [({"ids": x, **more}, y) for x, y in IDS])
    for sees, more in KINDS.items()
} | (of_hugging_face() if sweep.HAVE_TRANSFORMERS else {})
