"""Batches with fewer rows than data ranks: evaluations and predictions of one process, and no training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import unisono.parallel as up
from parallel import models
from parallel.plain_training import begun, seeded
from parallel.predictions import close
from parallel.weights import counted, padded

PLANS = (
    up.Plan(data=2), up.Plan(data=2, zero=3, micro_batches=2), up.Plan(data=2, sync_batch_norm=True),
)  # fmt: skip


def check_a_rank_without_rows(folder: Path) -> None:
    """Seven rows in batches of three: the last batch has one."""
    x, y = models.vector_batches(1, 7)[0]
    loss = torch.nn.functional.cross_entropy
    wanted = [loss(seeded(models.mlp)(x[i : i + 3]), y[i : i + 3]).item() for i in (0, 3, 6)]
    batches = [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6)]
    pairs = list(zip(x, y, strict=True))
    for plan in PLANS:
        run = begun(plan, models.mlp, loss)
        run.model.eval()
        for loader in (batches, DataLoader(pairs, batch_size=3)):
            *_, last = parts = list(run.shard(loader))
            found = [run.evaluate(part) for part in parts]
            assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5
        assert [*last[0].shape] == [1 - dist.get_rank(), 16]
        result = run.predict(last[0])
        assert [*result.shape] == [1 - dist.get_rank(), 4]
        close(result, seeded(models.mlp)(x[6:])[: len(result)])
        with pytest.raises(ValueError, match="rank 1 has no rows in this batch.*drop_last=True"):
            run.step(last)
        run.step(parts[0])


def check_labels_are_weighed(folder: Path) -> None:
    (batch,) = padded()[:1]
    one: Any = tuple(part[3:4] for part in batch)
    wanted = models.token_loss(seeded(models.gpt)(one[0]), one[1]).item()
    for weigh in (counted, "tokens", None):
        run = begun(up.Plan(data=2), models.gpt, models.token_loss, weigh=weigh)
        (mine,) = run.shard([one])
        assert abs(run.evaluate(mine) - wanted) < 1e-5
