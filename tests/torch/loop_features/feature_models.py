"""The models that the table of features trains, and their batches. Nothing here knows of ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LAYERS, TIME, ROWS = 32, 16, 2, 4, 8, 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Mixture(nn.Module):
    """Two of four experts for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, given: Tensor) -> Tensor:
        x = given.flatten(0, -2)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            output = output.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return output.view_as(given)


class Block(nn.Module):
    def __init__(self, dropout: float, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = Mixture() if experts else Expert()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mix(self.norm2(x)))


class Text(nn.Module):
    """A small transformer that predicts the next token; with labels it computes its loss, too."""

    def __init__(
        self, *, experts: bool = False, dropout: float = 0.0, tied: bool = False, scalar: bool = False
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, experts) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if scalar else 1.0
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.scale
        return logits if labels is None else {"logits": logits, "loss": token_loss(logits, labels)}


class SharedProducts(Text):
    """Two products after it, by two functions of matrices."""

    def __init__(self, first: Any, second: Any, *, experts: bool = False) -> None:
        super().__init__(experts=experts)
        self.first, self.second = first, second
        self.down, self.up = nn.Parameter(torch.randn(WORDS, 6)), nn.Parameter(torch.randn(6, WORDS))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.second(self.first(super().forward(ids), self.down), self.up)


class Normed(nn.Module):
    """Vectors through a BatchNorm."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)
        self.mix = Mixture() if experts else Expert()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.first(x)))
        return self.last(x + self.mix(x))


class Adapted(nn.Module):
    """A frozen layer with an adapter in low rank."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def adapted(*, experts: bool = False) -> nn.Module:
    model = Text(experts=experts).requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = Adapted(block.query), Adapted(block.value)
    return model


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(steps: int, rows: int = ROWS, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and the same ones a position later."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (steps, rows, TIME + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def padded(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of unequal length: labels of padding are ignored."""
    lengths = torch.arange(ROWS).unsqueeze(1) % TIME + 1
    return [(x, y.masked_fill(torch.arange(TIME) >= lengths, -100)) for x, y in texts(steps)]


def vectors(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, ROWS, 16, generator=generator)
    return [(vector, vector[:, :4].argmax(1)) for vector in x]
