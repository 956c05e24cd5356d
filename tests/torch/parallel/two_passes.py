"""Weights whose gradients do not follow one by one from those of a stage's inputs. On two ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.plain_training import same
from parallel.program_stages import PIPELINE, SCHEDULES, TIME, WIDTH, WORDS, batches, loss
from parallel.run_features import in_group


class Relative(nn.Module):
    """What follows from parameters alone is used by several layers, as relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.places, self.gain = nn.Parameter(torch.randn(TIME, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.table(ids), None
        for number, (first, query, key, value) in enumerate(self.layers):
            x = x + torch.tanh(first(x))
            if number == 3:
                places = self.places * 2.0 + self.gain
            if places is not None:
                x = x + torch.softmax(query(x) @ key(places).T, -1) @ value(places)
        return self.head(x)


def check_weights_of_weights_in_two_passes(folder: Path) -> None:
    given = [(inputs["ids"], targets) for inputs, targets in batches()]
    for plan in (PIPELINE, *SCHEDULES[3:5]):
        same(plan, Relative, given, loss, sample=given[0][0])


class Gives(nn.Module):
    """A piece that sends a parameter to the next one, which its input does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.gain.expand(len(x), -1) * 2.0


class Takes(nn.Linear):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(x) * gain)


class Chain(nn.Sequential):
    def forward(self, x: Any) -> Tensor:
        for piece in self:
            x = piece(*x) if isinstance(x, tuple) else piece(x)
        return x


def check_pieces_that_send_weights_in_two_passes(folder: Path) -> None:
    def make() -> nn.Module:
        return Chain(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Gives(), Takes(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    generator = torch.Generator().manual_seed(1)
    given = [(torch.randn(8, WIDTH, generator=generator), torch.arange(8) % 4) for _ in range(3)]
    plan = up.Plan(pipeline=2, micro_batches=4, schedule="zbv", cuts=(2, 3, 4))
    same(plan, make, given, functional.cross_entropy, pieces=list)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
