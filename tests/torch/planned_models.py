"""Models and batches for tests of plans: name -> (model, loss, a batch of so many rows)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH = 64, 16, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.after(x))))


def gpt() -> nn.Module:
    blocks = (Block(WIDTH) for _ in range(3))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def mlp() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(WIDTH * 4, WIDTH * 4), nn.GELU()) for _ in range(5))
    return nn.Sequential(*layers, nn.Linear(WIDTH * 4, 10))


def tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(rows: int) -> tuple[Tensor, Tensor]:
    found = torch.arange(rows * LENGTH).view(rows, LENGTH) % WORDS
    return found, found.clone()


def features(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, WIDTH * 4), torch.arange(rows) % 10


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], Any]]] = {
    "gpt": (gpt, tokens_loss, ids),
    "mlp": (mlp, functional.cross_entropy, features),
}
