"""An axis of a plan is a record and a field: one that no plan has trains as one process does."""

import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
from unisono.parallel import axes


@dataclass(frozen=True, kw_only=True)
class EnsemblePlan(up.Plan):
    ensemble: int = 1


def batch():
    made = torch.Generator().manual_seed(3)
    return torch.randn(4, 8, generator=made), torch.randn(4, 4, generator=made)


def model(dropout):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_share_nothing(rank, tmp_path, monkeypatch, zero):
    meeting = {"init_method": f"file://{tmp_path}/meet", "rank": rank, "world_size": 2}
    dist.init_process_group("unisono", **meeting)
    ensemble = axes.PlanAxis("ensemble", "", copies=True, draws=True)
    for module in ("mesh", "plan"):
        every = (*axes.AXES[:-1], ensemble, axes.AXES[-1])
        monkeypatch.setattr(sys.modules[f"unisono.parallel.{module}"], "AXES", every)
    inputs, targets = batch()
    one = model(0.0)
    sgd = torch.optim.SGD(one.parameters(), lr=0.1)
    settings = {"optimizer": lambda each: torch.optim.SGD(each, lr=0.1), "loss": nn.functional.mse_loss}
    run = up.parallelize(model(0.0), EnsemblePlan(ensemble=2, zero=zero), **settings)
    for _ in range(3):
        sgd.zero_grad()
        loss = nn.functional.mse_loss(one(inputs), targets)
        loss.backward()
        sgd.step()
        assert run.step((inputs, targets)) == pytest.approx(loss.item(), rel=1e-6)

    drawn = up.parallelize(model(0.5), EnsemblePlan(ensemble=2), **settings)
    drawn.step((inputs, targets))
    masks = [None, None]
    dist.all_gather_object(masks, drawn.mesh.draws)
    dist.destroy_process_group()
    assert masks == [[0, 0, 0], [1, 0, 0]]  # ensemble, data, pipeline
