"""Buffers that a forward changes: the same on all ranks after each step, and in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from parallel import models
from parallel.plain_training import begun, seeded

PLANS = (
    up.Plan(data=2), up.Plan(data=2, zero=1), up.Plan(data=2, zero=3), up.Plan(data=2, micro_batches=2),
    up.Plan(data=2, swap="memory"), up.Plan(data=2, uneven_use=True),
)  # fmt: skip


class Codes(nn.Module):
    """What it keeps: a mean that is replaced, a count in whole numbers, a table that grows with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
            self.seen += 1 + dist.get_rank()
            self.table = torch.zeros(3 + dist.get_rank())
        return x - self.mean


def normed() -> nn.Module:
    return nn.Sequential(Codes(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def made(plan: up.Plan, make: Any = normed) -> up.Run:
    return begun(plan, make)


def check_running_statistics_are_averaged(folder: Path) -> None:
    batches = models.vector_batches(6, 8)
    alone = seeded(normed)
    alone(batches[0][0])
    for plan in PLANS:
        run, close = made(plan), 1e-6
        first, *others = run.shard(batches)
        run.step(first)
        found = run.model.state_dict(keep_vars=True) if plan.swap is None else dict(run.model.named_buffers())
        if plan.micro_batches == 1:  # else the mean is that of two updates
            torch.testing.assert_close(found["0.mean"], alone[0].mean, rtol=close, atol=close)
            wanted = alone[2].running_mean
            torch.testing.assert_close(found["2.running_mean"], wanted, rtol=close, atol=close)
        assert int(run.model[0].seen) == plan.micro_batches  # rank 0's
        assert len(run.model[0].table) == 3 + dist.get_rank()
        for batch in others:
            run.step(batch)
            assert spread_of(run) == 0, plan
        where = folder / str(PLANS.index(plan))
        run.save(where)
        again = made(up.Plan(data=2))
        again.load(where)
        for name, value in run.model.named_buffers():
            assert name == "0.table" or torch.equal(again.model.get_buffer(name), value), name
        run.close()


def spread_of(run: up.Run) -> float:
    worst = 0.0
    for name, value in run.model.named_buffers():
        if name == "0.table":
            continue
        told = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(told, value)
        worst = max(worst, float((told[0] - told[1]).abs().max()))
    return worst


def check_what_a_program_changed_between_steps_is_averaged_in_a_checkpoint(folder: Path) -> None:
    run = made(up.Plan(data=2))
    (batch,) = run.shard(models.vector_batches(1, 8))
    run.step(batch)
    with torch.no_grad():
        run.model(torch.randn(4, 16) + dist.get_rank())
    run.save(folder / "saved")
    assert spread_of(run) == 0


def check_an_evaluation_that_changes_buffers_is_refused(folder: Path) -> None:
    run = made(up.Plan(data=2))
    (batch,) = run.shard(models.vector_batches(1, 8))
    with pytest.raises(RuntimeError, match=r"'0\.mean'.*run\.model\.eval\(\)"):
        run.evaluate(batch)
    run.model.eval()
    run.evaluate(batch)


def check_statistics_of_a_recomputed_unit_move_once(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    for more in ({"data": 2}, {"data": 2, "zero": 3}, {"data": 2, "sync_batch_norm": True}, {"pipeline": 2}):
        found = []
        for again in (False, True, "selective"):
            run = made(up.Plan(**more, recompute=again))
            losses = [run.step(batch) for batch in run.shard(batches)]
            found.append((losses, [value.clone() for value in run.model.buffers() if not value.is_meta]))
        for losses, buffers in found[1:]:
            assert losses == pytest.approx(found[0][0], abs=1e-6), more
            for value, wanted in zip(buffers, found[0][1], strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)


class Counting(nn.Linear):
    """A layer that follows a buffer, which it moves."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.level.lerp_(x.detach().mean(), 0.1)
        return super().forward(x - self.level)


def check_other_buffers_of_a_recomputed_unit_are_refused(folder: Path) -> None:
    for more in ({"data": 2}, {"data": 2, "zero": 3}):
        run = made(up.Plan(**more, recompute=True), lambda: nn.Sequential(Counting(), nn.Linear(16, 4)))
        (batch,) = run.shard(models.vector_batches(1, 8))
        with pytest.raises(RuntimeError, match=r"recompute= runs .*'0\.level' twice"):
            run.step(batch)


def check_every_stage_keeps_its_own(folder: Path) -> None:
    """A pipeline of two stages has the statistics of one process that computes the same micro-batches."""
    alone = seeded(normed)
    run = made(up.Plan(pipeline=2, micro_batches=2))
    x, y = models.vector_batches(1, 8)[0]
    for half in (x[:4], x[4:]):
        alone(half)
    run.step((x, y))
    here = [name for name, p in run.model.named_parameters() if not p.is_meta]
    if any(name.startswith("2.") for name in here):
        torch.testing.assert_close(run.model[2].running_mean, alone[2].running_mean, rtol=1e-5, atol=1e-5)
