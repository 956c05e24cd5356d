"""What planner_machine.py measures: six models of some size, and small ones of the zoo of the tests."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MAKERS", "load"]

TESTS = Path(__file__).resolve().parent.parent / "tests" / "torch"
ZOO_ROWS = 16


def tokens(vocab: int, rows: int, length: int) -> tuple[Any, Any]:
    ids = torch.randint(vocab, (rows, length))
    return ids, ids


def language(out: Any, ids: Any) -> Any:
    return functional.cross_entropy(out.flatten(0, 1), ids.flatten())


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=bias) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.rotary:
            half = q.shape[-1] // 2
            steps, each = (torch.arange(n, device=x.device) for n in (x.shape[1], half))
            places = steps[:, None] * torch.pow(1e4, -each / half)
            cos, sin = places.cos(), places.sin()
            q, k = (
                torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
                for a, b in (each.chunk(2, -1) for each in (q, k))
            )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, llama: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.first, self.second = norm(hidden), norm(hidden)
        self.attention = Attention(hidden, heads, not llama, llama)
        self.mlp: nn.Module = Gated(hidden, 8 * hidden // 3 // 8 * 8)
        if not llama:
            self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def decoder(llama: bool) -> tuple[Any, Any, Any]:
    hidden = 192
    layers = [Layer(hidden, 6, llama) for _ in range(4)]
    body = [nn.Embedding(1024, hidden), *layers, nn.LayerNorm(hidden), nn.Linear(hidden, 1024)]
    return nn.Sequential(*body), tokens(1024, 8, 64), language


def encoder() -> tuple[Any, Any, Any]:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Linear(48, 128), *layers, nn.Flatten(), nn.Linear(128 * 32, 10))
    return model, (torch.randn(16, 32, 48), torch.randint(10, (16,))), functional.cross_entropy


def cnn() -> tuple[Any, Any, Any]:
    def stage(before: int, width: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
        )

    widths = (3, 32, 64, 96, 128)
    stages = [stage(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*stages, nn.Flatten(), nn.Linear(128 * 4, 10))
    return model, (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), functional.cross_entropy


def mlp() -> tuple[Any, Any, Any]:
    layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 512))
    return model, (torch.randn(128, 512), torch.randn(128, 512)), functional.mse_loss


class Recommender(nn.Module):
    """Features looked up in a table, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8000, 64)
        self.layers = nn.Sequential(
            nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, ids: Any) -> Any:
        return self.layers(self.table(ids).flatten(1)).squeeze(-1)


def tables() -> tuple[Any, Any, Any]:
    return Recommender(), (torch.randint(8000, (256, 8)), torch.randn(256)), functional.mse_loss


MAKERS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "gpt": lambda: decoder(llama=False),
    "llama": lambda: decoder(llama=True),
    "encoder": encoder,
    "cnn": cnn,
    "mlp": mlp,
    "tables": tables,
}
"""Name -> what makes (model, batch, loss)."""


def load(name: str) -> tuple[Callable[[], Any], Any, Any]:
    """What makes the model, a batch of a step, and the loss.

    Args:
        name: one of MAKERS, or of the zoo, such as "resnet-bn"; some of those need transformers.
    Raises:
        KeyError: there is none.
    """
    if name in MAKERS:
        _, batch, loss = MAKERS[name]()
        return lambda: MAKERS[name]()[0], batch, loss
    sys.path.insert(0, str(TESTS))
    from unisono.parallel.graph.containers import mapped
    from zoo.animals import ANIMALS

    animal = ANIMALS[name]
    batch = animal.batch(torch.Generator().manual_seed(0))
    return animal.make, mapped(batch, lambda t: torch.cat([t] * (ZOO_ROWS // len(t)))), animal.loss
