"""Models whose steps show what a training adds to its operators; a plain loop that times one on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from unisono.parallel.costs.step_parts import phase_seconds


def mean_of_ranks(values: Iterable[float]) -> tuple[float, ...]:
    """The means over all ranks of the job."""
    total = torch.tensor([*values], dtype=torch.float64)
    dist.all_reduce(total)
    return tuple((total / dist.get_world_size()).tolist())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of these models."""
    return torch.optim.AdamW(parameters, lr=1e-3)


clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
"""Seconds that this thread has had its core, if it has one: other programs delay these less."""


def timed(step: Callable[[], object], now: Callable[[], float] = clock) -> float:
    """The seconds of a step that all ranks begin together."""
    dist.barrier()
    began = now()
    step()
    return now() - began


class Reference(NamedTuple):
    """A model with a batch and its loss."""

    name: str
    model: nn.Module
    batch: tuple[Any, Any]
    loss: Callable[[Any, Any], Tensor]


class PhaseSeconds(NamedTuple):
    """The seconds of each phase of a step."""

    forward: float
    backward: float
    update: float


class ReferenceLayer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def _gpt(hidden: int, layers: int, rows: int, tokens: int, vocab: int) -> Reference:
    model = nn.Sequential(
        nn.Embedding(vocab, hidden),
        *(ReferenceLayer(hidden, hidden // 64 or 1) for _ in range(layers)),
        nn.LayerNorm(hidden),
        nn.Linear(hidden, vocab),
    )
    ids = torch.randint(vocab, (rows, tokens))
    return Reference(
        "gpt", model, (ids, ids), lambda out, ids: functional.cross_entropy(out.flatten(0, 1), ids.flatten())
    )


def _cnn() -> Reference:
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * 16, 10))
    batch = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return Reference("cnn", model, batch, functional.cross_entropy)


def _mlp() -> Reference:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))
    return Reference("mlp", model, (torch.randn(256, 768), torch.randn(256, 768)), functional.mse_loss)


def tiny(layers: int = 3) -> Reference:
    """A GPT that is all overhead."""
    return _gpt(32, layers, 1, 8, 64)


def reference_models() -> list[Reference]:
    """Models that are mostly work."""
    return [_gpt(256, 3, 4, 128, 2048), _cnn(), _mlp()]


def timed_phases(reference: Reference, rounds: int) -> PhaseSeconds:
    """Train in a plain loop, each round on all ranks together: the mean of their medians of the rounds."""
    model, (inputs, targets) = reference.model, reference.batch
    parameters, found = [*model.parameters()], list[tuple[float, float, float]]()
    made = adamw(parameters)
    for _ in range(rounds):
        dist.barrier()
        found.append(phase_seconds(lambda: reference.loss(model(inputs), targets), parameters, [made], clock))
        made.zero_grad()
    return PhaseSeconds(*mean_of_ranks(map(statistics.median, zip(*found[1:], strict=True))))
