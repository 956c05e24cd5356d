"""Models and batches for tests of plans: name -> (model, loss, a batch of so many rows).

MODELS are two that most tests take; KINDS are all: of each family one, whose shapes no value decides. LARGE
have parameters of 50 to 200 MB: there segments of 2 and 20 MiB are small beside tensors.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from inside_parallel import MemoryTracker, StorageWatch, TrainingTask, balance, counted_costs, kernel_memory

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


def gpt(width: int = WIDTH, layers: int = 3) -> nn.Module:
    blocks = (Block(width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS))


def mlp() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(WIDTH * 4, WIDTH * 4), nn.GELU()) for _ in range(5))
    return nn.Sequential(*layers, nn.Linear(WIDTH * 4, 10))


class GatedBlock(nn.Module):
    """Llama's: RMSNorm, key heads that query heads share, a gated MLP, no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (each(y).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """Stacked experts. Each computes all rows, so that no value decides about a shape."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.first = nn.Parameter(torch.empty(count, width, 2 * width))
        self.second = nn.Parameter(torch.empty(count, 2 * width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.second, std=0.02)

    def forward(self, rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        shares = rows.new_zeros(rows.shape[0], self.num_experts).scatter(1, chosen, weight.to(rows.dtype))
        inner = functional.gelu(torch.einsum("rw,ewf->erf", rows, self.first))
        return torch.einsum("erf,efw,re->rw", inner, self.second, shares)


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(width), nn.Linear(width, 4), Experts(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        return x + self.experts(rows, chosen, weight).view(x.shape)


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(self.source(source), self.target(target)))


class UNet(nn.Module):
    """Convolutions down and up again, with connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 16, 3, padding=1)
        self.down1, self.down2 = (nn.Conv2d(16 * n, 32 * n, 3, stride=2, padding=1) for n in (1, 2))
        self.norm1, self.norm2 = nn.GroupNorm(4, 32), nn.GroupNorm(4, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.ConvTranspose2d(64, 16, 2, stride=2)
        self.out, self.head = nn.Conv2d(32, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.silu(self.into(x))
        second = functional.silu(self.norm1(self.down1(first)))
        third = functional.silu(self.norm2(self.down2(second)))
        up = torch.cat([self.up2(third), second], dim=1)
        up = torch.cat([self.up1(up), first], dim=1)
        return self.head(functional.silu(self.out(up)).mean((2, 3)))


def llama(width: int = WIDTH, layers: int = 3) -> nn.Module:
    blocks = (GatedBlock(width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.RMSNorm(width), nn.Linear(width, WORDS))


def moe() -> nn.Module:
    blocks = (kind(WIDTH) for _ in range(2) for kind in (Block, ExpertBlock))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def cnn() -> nn.Module:
    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(
        stage(3, 16), stage(16, 32), nn.MaxPool2d(2), stage(32, 64), stage(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(rows: int) -> tuple[Tensor, Tensor]:
    found = torch.arange(rows * LENGTH).view(rows, LENGTH) % WORDS
    return found, found.clone()


def features(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, WIDTH * 4), torch.arange(rows) % 10


def pairs(rows: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens, targets = ids(rows)
    return (tokens, tokens.flip(0)), targets


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, rows * 3 * 16 * 16).view(rows, 3, 16, 16), torch.arange(rows) % 10


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def measured(model: nn.Module, loss: Callable[..., Any], sample: Any) -> int:
    """The peak of a step of one process, with values: the sum of all storages that are alive."""
    optimizer = adamw(model.parameters())
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    optimizer.zero_grad()
    watch = StorageWatch("cpu", kernel_memory(on_gpu=False, virtual=False))
    account = MemoryTracker(None, watch.place)
    watch.account = account
    state = [t for held in optimizer.state.values() for t in held.values()]
    for tensor in [*model.parameters(), *state, *sample]:
        watch.see(tensor)
    with watch:
        value = loss(model(sample[0]), sample[1])
        watch.see(value.detach().double())  # the run's sum of losses
        value.backward()
        optimizer.step()
    return account.peak.nbytes


Kind = tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], Any]]
MODELS: dict[str, Kind] = {"gpt": (gpt, tokens_loss, ids), "mlp": (mlp, functional.cross_entropy, features)}
KINDS: dict[str, Kind] = MODELS | {
    "llama": (llama, tokens_loss, ids),
    "moe": (moe, tokens_loss, ids),
    "translator": (Translator, tokens_loss, pairs),
    "cnn": (cnn, functional.cross_entropy, images),
    "unet": (UNet, functional.cross_entropy, images),
}
LARGE: dict[str, Kind] = {
    "gpt of 50 MB": (lambda: gpt(512, 4), tokens_loss, ids),
    "gpt of 101 MB": (lambda: gpt(512, 8), tokens_loss, ids),
    "llama of 197 MB": (lambda: llama(768, 7), tokens_loss, ids),
}


def with_stages(plan: up.Plan, task: TrainingTask) -> up.Plan:
    """The plan, with the stages of pieces that a dry run takes. A sample would decide by measured times."""
    pieces = task.structure(task.model, None).pieces
    if plan.pipeline == 1 or plan.cuts or not pieces:
        return plan
    return replace(plan, cuts=balance(counted_costs(pieces), plan.stages))


def planned(**more: Any) -> up.ModelChoice:
    """A choice for the MLP on two ranks."""
    options: dict[str, Any] = {
        "sample": features(4),
        "batch": 16,
        "optimizer": adamw,
        "loss": functional.cross_entropy,
        "ranks": 2,
        "trial": False,
    }
    return up.plan(mlp(), **{**options, **more})
