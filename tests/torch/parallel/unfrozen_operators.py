"""Operators that PyTorch chooses by what is trained: frozen, trained and frozen again between steps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.plain_training import apart, seeded
from parallel.run_features import in_group

FROZEN = ("mask", "table")
PLANS = (
    up.Plan(pipeline=2, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=4, schedule="zb-h1"),
    up.Plan(context=2),
)


class Attends(nn.Module):
    """Stages begin within it. A mask that is trained takes another attention; singular values of what is
    trained are computed with their vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 5)
        self.mask = nn.Parameter(torch.randn(8, 8))
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        found = self.norm(found.transpose(1, 2).flatten(2))
        return self.last(found) * torch.linalg.svdvals(self.table).sum()


def trained(model: nn.Module, step: int) -> None:
    for name, value in model.named_parameters():
        value.requires_grad_(name not in FROZEN or step in (1, 2))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def alone(batches: list[Any]) -> list[float]:
    model = seeded(Attends)
    optimizer, found = sgd(model.parameters()), []
    for step, (x, y) in enumerate(batches):
        trained(model, step)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def check_operators_follow_what_is_trained(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 8, 8, generator=generator), torch.randint(5, (8, 8), generator=generator))
        for _ in range(5)
    ]
    wanted = alone(batches)
    for plan in PLANS:
        model = seeded(Attends)
        trained(model, 0)
        run = up.parallelize(model, plan, optimizer=sgd, loss=loss, sample=batches[0][0])
        found = []
        for step, batch in enumerate(run.shard(batches)):
            trained(run.model, step)
            found.append(run.step(batch))
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        print(f"{plan}: losses {worst:.1e}, apart {apart(run):.1e}", flush=True)
        assert worst < 1e-5, (plan, found, wanted)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
