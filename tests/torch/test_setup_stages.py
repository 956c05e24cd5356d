"""The stages of `parallelize`, each alone, on rank 0 of a job whose other ranks are not there."""

import pytest
import torch
from torch import nn

from unisono.parallel import build
from unisono.parallel.materialize import Initializer
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.plan import Plan
from unisono.torch_internals.lone_rank import lone_rank

SAMPLE = torch.zeros(2, 8)


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))


def beginning(given, plan):
    return build.SetupBeginning(Initializer(given, seed=None, init=None), 7, PlanMesh.of(plan, "cpu"))


@pytest.mark.parametrize("plan", [Plan(data=4, zero=1), Plan(tensor=2, data=2), Plan(pipeline=4)], ids=str)
def test_each_stage_takes_what_the_ones_before_return(plan):
    given = model()
    shapes = {name: tuple(value.shape) for name, value in given.named_parameters()}
    with lone_rank(0, 4):
        whole = build.record(given, beginning(given, plan), sample=SAMPLE)
        assert {name: tuple(value.shape) for name, value in given.named_parameters()} == shapes
        assert (len(whole.starts) == 3) is (plan.pipeline == 4)

        part = build.split(whole)
        assert (part.decision is not None) is (plan.tensor == 2)
        mine = given[0].weight.to_local() if plan.tensor == 2 else given[0].weight
        assert tuple(mine.shape) == ((8, 8) if plan.tensor == 2 else (16, 8))

        placed = build.place(whole, part)
        assert (given[3] in placed.elsewhere) is (plan.pipeline == 4)

        built = build.wire(whole, part, placed, seed=7)
    assert built.seed == 7
    assert set(built.named) == (set(shapes) if plan.pipeline == 1 else {"0.weight", "0.bias"})
