"""Bubbles of stages that sleep, beside the formulas. `main(rank, size, folder)`."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from inside_parallel import Action, predict
from inside_parallel import schedule as plan_of
from parallel.group_of_a_job import process_group

SECONDS = 0.3  # of a forward, on one rank


class Sleeps(torch.autograd.Function):
    """Sleeps for so long in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Sleeper(nn.Module):
    """A layer whose forward, gradient of inputs and gradient of weights take equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(8)), seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = Sleeps.apply(self.weight, 0.0, self.seconds)
        if not x.requires_grad:  # the first stage: nobody wants the gradient of its inputs
            x = x.clone().requires_grad_()
        return Sleeps.apply(x, self.seconds, self.seconds) @ weight


def measured_bubble(schedule: str, ranks: int, micro_batches: int, chunks: int) -> float:
    stages = ranks * chunks
    model = nn.Sequential(*(Sleeper(SECONDS / chunks) for _ in range(stages)))
    plan = up.Plan(
        pipeline=ranks, schedule=schedule, micro_batches=micro_batches, cuts=tuple(range(1, stages)),
    )  # fmt: skip
    run = up.parallelize(model, plan, optimizer=torch.optim.AdamW, loss=functional.mse_loss)
    x = torch.randn(micro_batches, 8)
    bubbles = []
    for _ in range(3):
        run.step((x, x))
        bubbles.append(run.timeline().bubble)
    return min(bubbles[1:])


def seconds(action: Action) -> float:
    """Nobody takes the first stage's gradient of inputs: its pass for weights computes both."""
    first = action.stage == 0
    return {"F": 1.0, "I": 0.0 if first else 1.0, "W": 2.0 if first else 1.0}[action.kind]


def check(p: int) -> None:
    """Sleeping stages; what is left over is Python between the actions."""
    m, found = 2 * p, {}
    for schedule, chunks, ideal in (
        ("gpipe", 1, (p - 1) / (m + p - 1)),
        ("1f1b", 1, (p - 1) / (m + p - 1)),
        ("interleaved", 2, (p - 1) / (2 * m + p - 1)),
        ("zb-h1", 1, (p - 1) / (3 * m + p - 1)),
        ("zbv", 2, predict(plan_of("zbv", p, m), seconds).bubble),
    ):
        everyone: list[Any] = [None] * p
        dist.all_gather_object(everyone, measured_bubble(schedule, p, m, chunks))
        found[schedule] = min(everyone) / ideal
    if dist.get_rank() == 0:
        print({schedule: f"{ratio:.3f}" for schedule, ratio in found.items()}, flush=True)
    assert all(abs(ratio - 1) < 0.1 for ratio in found.values()), found


def main(rank: int, size: int, folder: Path) -> None:
    with process_group(rank, size, folder):
        check(size)
