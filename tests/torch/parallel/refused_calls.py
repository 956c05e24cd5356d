"""Calls and optimizers that could train nothing, or half of the model: refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.run_features import adamw


def check_calls_that_would_train_nothing_are_refused(folder: Path) -> None:
    batch = models.vector_batches(1, 8)[0]

    def begin(plan: up.Plan, **more: Any) -> up.Run:
        how = {"optimizer": adamw, "loss": functional.cross_entropy} | more
        return up.parallelize(models.make("mlp"), plan, **how)

    for plan in (up.Plan(data=2), up.Plan(pipeline=2)):
        run = begin(plan)
        (mine,) = run.shard([batch])
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"step within torch.inference_mode"):
            run.step(mine)
        with torch.no_grad():  # a step has gradients of its own
            first = run.step(mine)
        assert run.step(mine) < first
        rows = begin(plan, loss=nn.CrossEntropyLoss(reduction="none"))
        with pytest.raises((ValueError, RuntimeError), match=r"the loss returned \[\d\] values"):
            rows.step(mine)
        with pytest.raises(ValueError, match=r"LBFGS.step needs a closure"):
            begin(plan, optimizer=torch.optim.LBFGS).step(mine)


def check_an_optimizer_that_cannot_step_parts_is_named(folder: Path) -> None:
    for plan in (up.Plan(data=2, zero=2), up.Plan(tensor=2)):
        run = up.parallelize(
            models.make("mlp"), plan, optimizer=torch.optim.Adafactor, loss=functional.cross_entropy
        )
        (mine,) = run.shard(models.vector_batches(1, 8))
        with pytest.raises(RuntimeError, match=r"Adafactor cannot step parameters that are cut"):
            run.step(mine)
