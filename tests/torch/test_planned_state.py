"""`up.plan` of what a step changes beside parameters: buffers, the state of an optimizer, not the job's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
from inside_parallel import DryRun, TrainingTask
from planned_models import adamw, features, mlp
from unisono.torch_internals import c10d
from unisono.torch_internals.lone_rank import lone_rank

CROSS = nn.functional.cross_entropy


class Counting(nn.BatchNorm1d):
    """Its output may follow what it has seen, so a run computes its statistics again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Totalling(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += 1
        return super().forward(x)


def test_a_buffer_that_changes_is_not_computed_again_but_for_those_of_batch_norm() -> None:
    def made(norm: nn.Module) -> nn.Module:
        block = nn.Sequential(nn.Linear(256, 256), norm, nn.GELU(), nn.Linear(256, 256), nn.GELU())
        return nn.Sequential(block, nn.Linear(256, 10))

    for norm, name in ((Counting(256), "0.1.running_mean"), (Totalling(256, 256), "0.1.total")):
        task = TrainingTask(made(norm), features(4), 16, adamw, CROSS)
        with pytest.raises(ValueError, match=name):
            DryRun(task, up.Plan(recompute=True)).peaks()
    model = made(nn.BatchNorm1d(256))
    task = TrainingTask(model, features(4), 4096, adamw, CROSS)
    kept, again = (DryRun(task, up.Plan(recompute=each)).peaks()[0].nbytes for each in (False, True))
    assert again < kept
    choice = up.plan(
        model, sample=features(4), batch=16, optimizer=adamw, loss=CROSS, trial=False,
        price=up.Plan(data=2, micro_batches=2),
    )  # fmt: skip
    assert choice.batch_norm_rows == choice.record()["batch_norm_rows"] == 4
    assert "BatchNorm takes its mean and variance of 4 rows" in str(choice)


def test_adafactor_is_planned_where_parameters_are_whole() -> None:
    options: dict[str, Any] = {
        "sample": features(4), "batch": 16, "loss": CROSS, "trial": False, "ranks": 2,
        "optimizer": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    }  # fmt: skip
    choice = up.plan(mlp(), data=2, **options)
    assert choice.plan.zero == 0
    whole = sum(value.numel() for value in mlp().parameters())
    matrices = [value.shape for value in mlp().parameters() if value.dim() == 2]
    vectors = whole - sum(shape.numel() for shape in matrices)
    moments = 4 * (sum(map(sum, matrices)) + vectors)
    assert abs(choice.record()["memory"]["moments"] - moments) < 512  # and the steps
    with pytest.raises(ValueError, match="Adafactor cannot step parameters that are cut"):
        up.plan(mlp(), price=up.Plan(data=2, zero=1), **options)


def test_a_dry_run_leaves_the_job_as_it_is() -> None:
    def state() -> Any:
        world = c10d.need(c10d.NAMES["state"])
        sizes = [*map(len, (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag))]
        return dist.group.WORLD, world.group_count, sizes, torch.get_rng_state().tolist()

    def check() -> None:
        task, before = TrainingTask(mlp(), features(16), 16, adamw, CROSS), state()
        DryRun(task, up.Plan(data=2, tensor=2, zero=3)).peak_of(0)
        with pytest.raises(ValueError, match="no layers of stacked experts"):
            DryRun(task, up.Plan(data=2, expert=2)).peak_of(0)
        assert state() == before and torch.is_grad_enabled()

    check()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    check()
    with lone_rank(3, 8), ThreadPoolExecutor(1) as pool:  # another thread may talk to the job's ranks
        assert (dist.get_world_size(), pool.submit(dist.get_world_size).result()) == (8, 1)
    dist.destroy_process_group()
