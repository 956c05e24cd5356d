"""Sequences that are cut over ranks: losses and gradients against one process."""

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


def check_the_losses_are_those_of_one_process(folder: Path) -> None:
    for heads in ((3, 3), (4, 2)):  # a ring, and an exchange of heads
        same(up.Plan(context=2), lambda: Decoder(*heads), batches(16), mean)
    same(up.Plan(context=2, zero=3, micro_batches=2, recompute=True), lambda: Decoder(3, 1), batches(19), mean)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
