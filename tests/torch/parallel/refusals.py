"""Wrong arguments and calls, ranks that differ, damaged checkpoints: refused by name, on two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.run_features import Branches, adamw, made


def check_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"needs 4 ranks, but this job has 2"):
        made("mlp", up.Plan(data=4))
    with pytest.raises(ValueError, match="which could not be recorded: Branches does what depends on"):
        up.parallelize(Branches(), up.Plan(pipeline=2), optimizer=adamw, loss=functional.cross_entropy)
    with pytest.raises(ValueError, match='no module of Sequential is called "nothing"'):
        made("mlp", up.Plan(tensor=2), cuts={"nothing": "row"})
    with pytest.raises(ValueError, match='"0" .Linear. cannot be cut by column: 2 does not divide 5'):
        odd = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
        cuts = {"0": "column", "2": "row"}
        up.parallelize(odd, up.Plan(tensor=2), optimizer=adamw, loss=functional.cross_entropy, cuts=cuts)
    run = made("mlp", up.Plan(pipeline=2))
    x, y = models.vector_batches(1, 4)[0]
    with pytest.raises(ValueError, match="have different numbers of rows"):
        run.step((x[: 2 + dist.get_rank()], y[: 2 + dist.get_rank()]))


def check_arguments_of_another_type_are_named(folder: Path) -> None:
    """On each rank alike, before a byte moves."""
    good: dict[str, Any] = {"optimizer": adamw, "loss": functional.cross_entropy}
    plan = up.Plan(data=2, zero=1)
    for wrong, says in (
        ({"model": None}, "model is a NoneType, expected an nn.Module"),
        ({"plan": {"data": 2}}, "plan is a dict, expected a Plan"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0)}, "optimizer is a SGD, expected a function"),
        ({"loss": 3}, "loss is a int, expected a function"),
        ({"pieces": 3}, "pieces is a int, expected a list"),
        ({"cuts": ["0"]}, "cuts is a list, expected a dict"),
        ({"optimizer": lambda p: None}, "optimizer returned a NoneType, expected torch.optim.Optimizer"),
    ):
        with pytest.raises(TypeError, match=f"parallelize: {says}"):
            up.parallelize(**{"model": models.mlp(), "plan": plan, **good, **wrong})
    others = list(models.mlp().parameters())
    with pytest.raises(ValueError, match="18 parameters of the optimizer are not among those"):
        up.parallelize(models.mlp(), plan, optimizer=lambda _: adamw(others), loss=good["loss"])
    run = made("mlp", plan)
    x, y = models.vector_batches(1, 4)[0]
    for batch, error, says in (
        (x, TypeError, r"a batch is \(inputs, targets\), not a Tensor"),
        ((x, y, y), TypeError, "not a tuple of 3"),
        ((x, y[:2]), ValueError, r"one number of rows in dimension 0, not \[2, 4\]"),
        ((x, torch.tensor(1)), ValueError, "a tensor of a batch has no dimension"),
        ((x[:0], y[:0]), ValueError, "this batch has no rows"),
    ):
        with pytest.raises(error, match=says):
            run.step(batch)
    assert list(run.shard([])) == []
    with pytest.raises(ValueError, match="keep is 0"):
        run.save(folder / "saved", keep=0)
    with pytest.raises(ValueError, match="every is 0"):
        up.Progress(run, every=0)
    run.step((x, y))  # it goes on


def check_ranks_that_differ_are_named(folder: Path) -> None:
    """Otherwise they would wait for each other in different calls."""
    second = dist.get_rank() == 1
    for plan in (up.Plan(tensor=2), up.Plan(data=4), up.Plan(data=2, clip=1.0)):
        with pytest.raises(ValueError, match=r"rank 0 Plan\(data=2\), rank 1 Plan\("):
            made("mlp", plan if second else up.Plan(data=2))
    wider, frozen = nn.Linear(16, 5 if second else 4), nn.Linear(16, 4)
    frozen.weight.requires_grad_(not second)
    for model, says in (
        (wider, r"'weight' is \[4, 16\], torch.float32 on rank 0, \[5"),
        (frozen, "frozen on rank 1"),
    ):
        with pytest.raises(ValueError, match=f"ranks have different models: .*{says}"):
            up.parallelize(model, up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)


def check_a_damaged_checkpoint_is_named(folder: Path) -> None:
    run = made("mlp", up.Plan(data=2, zero=1))
    (batch,) = run.shard(models.vector_batches(1, 8))
    run.step(batch)
    shared = folder / "saved"
    run.save(shared)
    saved = shared / "step-00000001"
    for file in sorted(saved.iterdir(), reverse=True):  # what holds tensors, then .metadata
        dist.barrier()
        if dist.get_rank() == 0:
            os.truncate(file, file.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(ValueError, match=rf"{saved} cannot be read .*it is damaged"):
            run.load(shared)


def check_a_parameter_that_the_plan_has_replaced_is_no_constant(folder: Path) -> None:
    """A loss that holds a parameter from before `parallelize`: as in one process, or refused in backward."""
    batch = models.vector_batches(1, 8)[0]

    def losses(plan: up.Plan) -> list[float]:
        model = models.mlp()
        held = model[0].weight

        def penalised(output: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(output, targets) + held.pow(2).mean()

        run = up.parallelize(model, plan, optimizer=adamw, loss=penalised)
        return [run.step(part) for part in run.shard([batch] * 2)]

    assert losses(up.Plan(data=2))[1] > 0  # the model has it still
    for plan in (up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2)):
        with pytest.raises(RuntimeError, match=r'the parameter "0.weight" that the model had before'):
            losses(plan)


# ---- calls and optimizers that could train nothing, or half of the model: refused by name ----


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
