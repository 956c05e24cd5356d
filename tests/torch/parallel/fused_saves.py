"""Checkpoints of fused layers, which tensor plans split: saved by one plan and continued by another."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import SWEEP
from parallel.plain_training import alone, begun

WIDTH = 16
TENSOR, ZERO, DATA = up.Plan(tensor=2), up.Plan(data=2, zero=3), up.Plan(data=2)
PLANS = (TENSOR, up.Plan(tensor=2, zero=1), ZERO, DATA, up.Plan(pipeline=2, micro_batches=2))


class Fused(nn.Module):
    """Attention of PyTorch's own, and a fused layer of three unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.gated, self.last = nn.Linear(WIDTH, 16 + 32 + 32), nn.Linear(32, 4)
        self.side = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unflatten(-1, (1, WIDTH))
        x = x + self.attn(x, x, x, need_weights=False)[0]
        side, gate, value = self.gated(x[:, 0]).split([16, 32, 32], -1)
        return self.last(torch.sigmoid(gate) * value) + self.side(torch.tanh(side))


class Twice(nn.Module):
    """A layer whose output is two things, of which each has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.both, self.side, self.last = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack(x.unbind(1), 0).sum(0)
        x = self.down(functional.gelu(self.up(x)))
        pair = self.both(x).unflatten(-1, (2, 8))
        x = self.side(pair.select(-2, 0) * pair.select(-2, 1).sigmoid()) + x  # not in the output
        last: Tensor = self.last(pair[:, :, 4:])
        return torch.movedim(last, 2, -1)


def check_a_layer_split_twice_keeps_the_names_of_the_model(folder: Path) -> None:
    given, target = torch.randn(8, 6, 8), torch.randn(8, 2, 8)
    run = up.parallelize(Twice(), TENSOR, sample=given, optimizer=torch.optim.AdamW, loss=functional.mse_loss)
    assert "both.3.weight" in dict(run.model.named_parameters()), str(run.cut)
    run.step((given, target))
    run.save(folder / "shared" / "twice")
    found = run.state_dict()
    run.load(folder / "shared" / "twice")
    assert all(torch.equal(value, found[name]) for name, value in run.state_dict().items())
    wanted = {name: value.shape for name, value in Twice().state_dict().items()}
    assert not found or {name: value.shape for name, value in found.items()} == wanted  # {}: not rank 0


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(count)
    ]


def made(plan: up.Plan) -> up.Run:
    given = batches(1)[0][0]
    plan = dataclasses.replace(plan)
    return begun(plan, Fused, sample=given)


def check_any_plan_continues_any_other(folder: Path) -> None:
    wanted = alone(Fused, batches(6), functional.cross_entropy).losses
    for number, first in enumerate(PLANS):
        run = made(first)
        if first.tensor > 1:
            assert "gated.1.weight" in run.cut.dims, str(run.cut)
            assert "attn.q.weight" in run.cut.dims, str(run.cut)
        for batch in run.shard(batches(3)):
            run.step(batch)
        place = folder / "shared" / str(number)
        run.save(place)
        for second in PLANS if SWEEP else [PLANS[number - 1]]:
            again = made(second)
            again.load(place)
            losses = [again.step(batch) for batch in again.shard(batches(6)[3:])]
            far = max(abs(a - b) for a, b in zip(losses, wanted[3:], strict=True))
            print(f"{first} -> {second}: {far:.1e}", flush=True)
            assert far < 1e-5, (first, second, losses, wanted)
