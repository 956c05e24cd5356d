"""Parameters that are unfrozen and frozen between steps: losses, moments and checkpoints of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.plain_training import apart, seeded
from parallel.run_features import in_group

PLANS = (
    up.Plan(data=2), up.Plan(data=2, uneven_use=True), up.Plan(data=2, zero=1), up.Plan(data=2, zero=2),
    up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=2, schedule="zb-h1"),
)  # fmt: skip
FIRST = 2  # the step before which the lower half is unfrozen


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def lower(model: Any) -> list[nn.Module]:
    """The first half of a model: under pipeline=2 all that its first stage trains."""
    return list(model[: len(model) // 2 + 1])


def set_trained(model: nn.Module, step: int) -> None:
    """Freeze the lower half, until `FIRST`; freeze its first entry again two steps later."""
    for module in lower(model):
        module.requires_grad_(step >= FIRST)
    model[0].requires_grad_(FIRST <= step < FIRST + 2)


def alone(make: Callable[[], nn.Module], batches: list[Any], loss: Any) -> list[float]:
    model, losses = seeded(make), []
    optimizer = decaying(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for step, (x, y) in enumerate(batches):
        set_trained(model, step)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


def check_losses_are_those_of_one_process(folder: Path) -> None:
    for make, batches, loss, plans in (
        (models.mlp, models.vector_batches(6, 8), functional.cross_entropy, PLANS),
        (models.gpt, models.text_batches(5, 4), models.token_loss, (up.Plan(tensor=2), up.Plan(tensor=2, zero=1))),
        (lambda: models.gpt(tied=True), models.text_batches(5, 4), models.token_loss, (up.Plan(pipeline=2),)),
    ):
        wanted = alone(make, batches, loss)
        for plan in plans:
            model = seeded(make)
            set_trained(model, 0)
            sample = batches[0][0] if plan.tensor > 1 else None
            run = up.parallelize(model, plan, optimizer=decaying, loss=loss, sample=sample)
            scheduler, found = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7), []
            for step, batch in enumerate(run.shard(batches)):
                set_trained(run.model, step)
                found.append(run.step(batch))
                scheduler.step()
                run.evaluate(batch)  # ZeRO 1 and 2 leave parameters gathered
                assert all(p.grad is None for p in run.parameters.values())
            worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
            print(f"{plan}: losses {worst:.1e}", flush=True)
            assert worst < 1e-5, (plan, found, wanted)
            assert apart(run) < 1e-5, plan


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
