"""Bubbles of stages that sleep, beside the formulas. `main(rank, size, folder)` on two ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
import unisono.torch  # noqa: F401


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A layer whose forward takes as long as it is told, its backward twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(self.layer(x), self.seconds)  # the layer's weight wants a gradient of it


def measured_bubble(schedule: str, micro_batches: int, chunks: int) -> float:
    stages = 2 * chunks
    model = nn.Sequential(*(Sleeper(0.2) for _ in range(stages)))
    plan = up.Plan(
        pipeline=2, schedule=schedule, micro_batches=micro_batches, cuts=tuple(range(1, stages)),
    )  # fmt: skip
    run = up.parallelize(model, plan, optimizer=torch.optim.AdamW, loss=functional.mse_loss)
    x = torch.randn(micro_batches, 8)
    bubbles = []
    for _ in range(3):
        run.step((x, x))
        bubbles.append(run.timeline().bubble)
    return min(bubbles[1:])


def check() -> None:
    """Sleeping stages; what is left over is Python between the actions."""
    for schedule, chunks, ideal in (("gpipe", 1, 1 / 5), ("1f1b", 1, 1 / 5), ("interleaved", 2, 1 / 9)):
        found = measured_bubble(schedule, 4, chunks)
        found_all: list[Any] = [None] * 2
        dist.all_gather_object(found_all, found)
        assert abs(min(found_all) - ideal) < 0.1 * ideal, (schedule, found_all, ideal)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    check()
    dist.destroy_process_group()
