"""A job that trains by its own choice: `main(rank, size, folder)`. All ranks have one plan."""

import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import unisono.parallel as up
from inside_parallel import PlanSearch, measure, planner
from parallel.run_features import in_group
from planned_models import adamw, features, mlp
from unisono.torch_internals import c10d

CROSS = torch.nn.functional.cross_entropy


def check(size: int) -> None:
    model, batch = mlp(), features(8)
    options = {"optimizer": adamw, "loss": CROSS, "sample": batch}
    run = up.parallelize(model, "auto", **options)
    told: list[object] = [None] * size
    dist.all_gather_object(told, str(run.plan))
    assert len(set(told)) == 1, told
    assert run.plan.ranks == size
    losses = [run.step(each) for each in run.shard([batch] * 3)]
    assert losses[-1] < losses[0]
    choice = up.plan(mlp(), **options, price=up.Plan(data=size, zero=3))
    again = up.parallelize(mlp(), choice, optimizer=adamw, loss=CROSS)
    assert again.plan == choice.plan
    assert again.plan.zero == 3
    check_inputs_are_those_of_the_choice(size)
    check_a_model_that_cannot_be_recorded(size)
    check_a_search_may_take_longer_than_the_limit(size, options)
    slow = up.StepForecast({"forward": 3600.0}, source="a guess")
    check_it_is_compared(replace(choice, chosen=choice.chosen._replace(time=slow)), batch)
    try:
        up.plan(mlp(), **options, memory=1000)
    except up.NoPlanFitsError:
        print("trained")


class TwoInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = torch.nn.Embedding(10, 16), torch.nn.Linear(3, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.body(self.words(ids).mean(1) + self.numbers(numbers))


def check_inputs_are_those_of_the_choice(size: int) -> None:
    """Stages and cuts follow from the program of the choice's sample: nobody writes it twice."""
    batch = {"ids": torch.arange(40).view(8, 5) % 10, "numbers": torch.randn(8, 3)}, torch.arange(8) % 4
    options = {"optimizer": adamw, "loss": CROSS}
    losses = []
    for plan in (up.Plan(data=size), up.Plan(pipeline=size, micro_batches=2), up.Plan(tensor=size)):
        torch.manual_seed(3)
        choice = up.plan(TwoInputs(), sample=batch, price=plan, **options)
        assert len(choice.inputs["ids"]) == 8 // plan.data // plan.micro_batches
        torch.manual_seed(3)
        run = up.parallelize(TwoInputs(), choice, **options)
        losses.append([run.step(each) for each in run.shard([batch] * 3)])
    assert all(abs(a - b) < 1e-5 for each in losses for a, b in zip(each, losses[0], strict=True)), losses


class ReadsValues(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)


def check_a_model_that_cannot_be_recorded(size: int) -> None:
    """It trains on the data axis, with ZeRO 3 where two copies do not fit; rank 0 tells why."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    losses = []
    for limit, plan in ((None, up.Plan(data=size)), (1000, up.Plan(data=size, zero=3))):
        torch.manual_seed(3)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            patch.setattr(planner, "measure", lambda *given, limit=limit: measure(*given).limited(limit))
            run = up.parallelize(ReadsValues(16, 4), "auto", optimizer=adamw, loss=CROSS, sample=batch)
        told = [str(each.message) for each in seen if "cannot record ReadsValues" in str(each.message)]
        assert run.plan == plan, run.plan
        assert len(told) == (dist.get_rank() == 0), told
        assert all(f"trains it by {plan}: " in text and "depends on the values" in text for text in told), (
            told
        )
        losses.append([run.step(each) for each in run.shard([batch] * 3)])
    assert all(abs(a - b) < 1e-5 for a, b in zip(*losses, strict=True)), losses


def check_a_search_may_take_longer_than_the_limit(size: int, options: dict[str, Any]) -> None:
    """Rank 0 alone searches; the others wait as long as it works, and learn its error."""
    world: Any = dist.group.WORLD
    before, priced = c10d.timeout_of(world), PlanSearch.price
    with pytest.MonkeyPatch.context() as patch:

        def slow(search: PlanSearch, plan: up.Plan) -> Any:
            assert dist.get_rank() == 0
            time.sleep(5)
            if plan.zero == 1:
                raise LookupError("no such operator")
            return priced(search, plan)

        patch.setattr(PlanSearch, "price", slow)
        world.set_timeout(timedelta(seconds=2))
        choice = up.plan(mlp(), **options, price=up.Plan(data=size, zero=2))
        assert choice.plan.zero == 2
        with pytest.raises(Exception, match="no such operator"):
            up.plan(mlp(), **options, price=up.Plan(data=size, zero=1))
        world.set_timeout(before)


def check_it_is_compared(choice: up.ModelChoice, batch: Any) -> None:
    """A run by a choice compares its first steps with the choice's forecast."""
    run = up.parallelize(mlp(), choice, optimizer=adamw, loss=CROSS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for each in run.shard([batch] * 9):
            run.step(each)
    told = [str(each.message) for each in seen if issubclass(each.category, up.ForecastWarning)]
    assert len(told) == (dist.get_rank() == 0), told
    assert all("less than the 3.6e+06 ms" in text and "a guess" in text for text in told), told


def main(rank: int, size: int, folder: Path) -> None:
    in_group(rank, size, folder, lambda _: check(size))
