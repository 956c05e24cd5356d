"""Parameters that are frozen and thawed between steps; loaders that are cut for ranks already."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unisono.parallel as up
from parallel import models
from parallel.parameter_table import Scaled
from parallel.plain_training import adamw, apart, begun, same, seeded


def check_a_scalar_is_saved_thawed_and_loaded(folder: Path) -> None:
    def make() -> nn.Module:
        model = Scaled()
        model.scale.requires_grad_(False)
        return model

    first, second, third, _ = models.vector_batches(4, 8)
    loss = functional.cross_entropy

    def begin(plan: up.Plan) -> tuple[up.Run, Any]:
        run = begun(plan, make, loss)
        return run, iter(run.shard([first, second, third]))

    found = []
    for plan in (up.Plan(data=2), up.Plan(data=2, zero=3)):
        run, batches = begin(plan)
        run.step(next(batches))
        run.model.scale.requires_grad_(True)
        run.step(next(batches))
        run.save(folder / f"zero{plan.zero}")
        found.append(run.step(next(batches)))
        shape = {name: tuple(value.shape) for name, value in run.weights() if value is not None}.get(
            "scale", ()
        )
        assert shape == (), shape
    other, batches = begin(up.Plan(data=2))
    other.model.scale.requires_grad_(True)
    other.load(folder / "zero3")
    next(batches), next(batches)
    found.append(other.step(next(batches)))
    assert max(found) - min(found) < 1e-5, found


def check_thawing_in_the_middle_is_refused(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    for plan, says in (
        (up.Plan(data=2, swap="memory"), "'memory'.*up.parallelize"),
        (up.Plan(data=2, compression=up.PowerSGD(rank=2)), "PowerSGD.*does not follow"),
        (up.Plan(data=2, zero=1, shard=1, local_steps=2), "local_steps=2.*does not follow"),
    ):
        model = seeded(models.mlp)
        model[0].requires_grad_(False)
        run = up.parallelize(model, plan, optimizer=adamw, loss=functional.cross_entropy)
        first, second, *_ = run.shard(batches)
        run.step(first)
        run.model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=rf"'0\.weight' was frozen .*{says}"):
            run.step(second)
        run.model[0].requires_grad_(False)
        run.close()


def check_freezing_in_the_middle(folder: Path) -> None:
    """The run trains on without them; under swap it says that it cannot."""
    batches = models.vector_batches(4, 8)
    for plan in (
        up.Plan(data=2), up.Plan(data=2, uneven_use=True), up.Plan(data=2, zero=1), up.Plan(data=2, zero=3),
    ):  # fmt: skip
        same(plan, models.mlp, batches, functional.cross_entropy, before=frozen_late)
    run = begun(up.Plan(data=2, swap="memory"), models.mlp)
    first, second, *_ = run.shard(batches)
    run.step(first)
    run.model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was trained .*up\.parallelize"):
        run.step(second)


def frozen_late(model: Any, step: int) -> None:
    model[0].requires_grad_(step < 2)


def check_a_new_run_trains_what_was_frozen(folder: Path) -> None:
    """A checkpoint of a run with frozen parameters continues in a run without: their moments begin anew."""
    batches = models.vector_batches(4, 8)
    model = seeded(models.mlp)
    model[0].requires_grad_(False)
    run = up.parallelize(model, up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    for batch in list(run.shard(batches))[:2]:
        run.step(batch)
    run.save(folder / "saved")
    again = up.parallelize(models.mlp(), up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    again.load(folder / "saved")
    for batch in list(again.shard(batches))[2:]:
        again.step(batch)
    assert again.optimizer.state[again.model[0].weight]["step"] == 2
    assert again.optimizer.state[again.model[2].weight]["step"] == 4
    assert apart(again) == 0


def check_a_sampler_that_cuts_for_ranks_is_refused(folder: Path) -> None:
    run = begun(up.Plan(data=2), models.mlp)
    rows = TensorDataset(torch.arange(16.0).view(16, 1))
    sampler = DistributedSampler(rows)
    with pytest.raises(ValueError, match=r"DistributedSampler .*1 of 2 parts.*shuffle=True"):
        list(run.shard(DataLoader(rows, batch_size=4, sampler=sampler)))
    alike = DistributedSampler(rows, num_replicas=1, rank=0)
    assert len(list(run.shard(DataLoader(rows, batch_size=4, sampler=alike)))) == 4
    batched = TensorDataset(torch.arange(16.0).view(4, 4, 1))  # an item is a batch
    own = [
        batch[0].flatten().tolist() for batch in run.shard(DataLoader(batched, batch_size=None, shuffle=True))
    ]
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, own)
    assert sorted(v for rank in everyone for batch in rank for v in batch) == list(range(16))
