"""Sequences that are cut over ranks: losses and gradients against one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.plain_training import same
from parallel.run_features import in_group
from unisono.parallel.context import attention

WIDTH, WORDS = 16, 32


class Attention(nn.Module):
    """Causal, with fewer heads of keys than of queries."""

    def __init__(self, heads: int, key_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dropout = heads, key_heads, dropout
        size = WIDTH // 4
        self.q, self.kv = nn.Linear(WIDTH, heads * size), nn.Linear(WIDTH, 2 * key_heads * size)
        self.out = nn.Linear(heads * size, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, time, _ = x.shape
        q = self.q(x).view(rows, time, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        k, v = (t.reshape(rows, time, self.key_heads, -1).transpose(1, 2) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, mask is None, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, time, -1))


class Block(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention(*attention)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x), mask)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Positions are a table; with `padded` the input is (ids, padding) and attention has a mask."""

    def __init__(self, heads: int = 3, key_heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, key_heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        time = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(time, device=ids.device))
        mask = None
        if padding is not None:
            mask = torch.ones(time, time, dtype=torch.bool).tril() & padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.words.weight.T


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(time: int, count: int = 3, rows: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(WORDS, (rows, time + 1), generator=generator) for _ in range(count)]
    return [(each[:, :-1], each[:, 1:]) for each in ids]


class Encoder(nn.Module):
    """PyTorch's own layers, which see all positions but the padding; the first position is classified."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, 4))

    def forward(self, ids: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.places[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        mean = (x * kept).sum(1) / kept.sum(1)
        return self.head(x[:, 0] + mean), x


class OwnLoss(Decoder):
    """Shifts its labels itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        shifted = logits[:, :-1].reshape(-1, WORDS)
        loss = functional.cross_entropy(shifted, labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class Recorded(nn.Module):
    """benchmarks/gpt.py, which looks back: its rows move between ranks."""

    def __new__(cls) -> Any:
        sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
        import gpt

        return gpt.GPT(layers=2, width=20, heads=5, context=32)


def classes(count: int = 3, rows: int = 4, time: int = 18) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        ids = torch.randint(WORDS, (rows, time), generator=generator)
        ends = torch.randint(1, time + 1, (rows, 1), generator=generator)
        targets = torch.randint(4, (rows,), generator=generator)
        found.append(({"ids": ids, "padding": torch.arange(time) >= ends}, targets))
    return found


def of_class(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output[0], targets) + output[1].pow(2).mean()


def check_the_losses_are_those_of_one_process(folder: Path) -> None:
    for heads in ((3, 3), (4, 2)):  # a ring, and an exchange of heads
        same(up.Plan(context=2), lambda: Decoder(*heads), batches(16), mean)
    same(up.Plan(context=2, zero=3, micro_batches=2, recompute=True), lambda: Decoder(3, 1), batches(19), mean)


def check_an_encoder(folder: Path) -> None:
    for zero in (0, 3):
        same(up.Plan(context=2, zero=zero, recompute=zero == 3), Encoder, classes(), of_class)


def check_a_mask(folder: Path) -> None:
    given = [({"ids": x, "padding": torch.arange(16) < 13}, y) for (x, y) in batches(16)]
    given = [({"ids": x["ids"], "padding": x["padding"].expand(4, 16)}, y) for x, y in given]
    for heads in ((3, 1), (4, 2)):
        same(up.Plan(context=2), lambda: Decoder(*heads), given, mean)


def check_the_gpt_of_the_benchmarks(folder: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [(torch.randint(256, (2, 33), generator=generator), torch.zeros(2)) for _ in range(3)]
    same(up.Plan(context=2), Recorded, given, lambda output, _: output)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
