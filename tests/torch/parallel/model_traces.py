"""What a plan finds in a model and leaves there: hooks, attributes, names of modules. On two ranks."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from parallel import models
from parallel.model_table import DATA, LOW, TENSOR, ZERO, Noted, Words, hooked
from parallel.models import Pair
from parallel.plain_training import adamw, begun, seeded
from parallel.structure_table import IMAGES, Images

X = models.vector_batches(1, 8)[0][0]


def check_a_second_run_finds_the_hooks_of_the_first(folder: Path) -> None:
    model = seeded(hooked)
    for _ in range(2):
        run = begun(DATA, lambda: model)
        (batch,) = run.shard(models.vector_batches(1, 8))
        run.step(batch)
        assert run.grad_norm is None
        with pytest.raises(ValueError, match=r"update=False adds up.*has a hook"):
            run.step(batch, update=False)


def check_a_recording_leaves_nothing_in_the_model(folder: Path) -> None:
    model: Any = Noted()
    up.capture(model, X)
    assert not hasattr(model, "width")
    graph = up.capture(Words(), X)
    assert [use.module for use in graph.uses("layers.1.attention.wo.weight")] == ["layers.1.attention.wo"]
    assert sum(frame.path == "layers.1.attention" for frame in graph.frames) == 1


def check_attributes_of_parameters_stay(folder: Path) -> None:
    def marked() -> Pair:
        model = Pair()
        model.fc1.weight.no_decay = True
        return model

    seen: list[list[str]] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        seen.append([name for name, one in parameters.named.items() if getattr(one, "no_decay", False)])
        return adamw(parameters)

    for plan in (DATA, ZERO, TENSOR, LOW):
        begun(plan, marked, optimizer=optimizer, sample=X)
    assert seen == [["fc1.weight"]] * 4, seen


def check_the_first_batch_is_the_sample(folder: Path) -> None:
    run = begun(TENSOR, Images)
    with pytest.raises(AttributeError, match=r"run\.optimizer: Images is recorded on .* sample="):
        _ = run.optimizer
    assert list(run.epochs(2)) == [0, 1]
    first = run.evaluate(IMAGES[0])
    assert type(run) is up.Run
    assert run.optimizer
    assert run.epoch == 2
    assert abs(first - run.step(IMAGES[0])) < 1e-5


def check_a_run_that_nothing_refers_to_is_freed(folder: Path) -> None:
    """With its model and its moments."""

    def used(plan: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        run = up.parallelize(model, up.Plan(**plan), optimizer=adamw, loss=nn.functional.mse_loss)
        run.step((torch.ones(4, 4), torch.zeros(4, 4)))
        run.close()
        return {"run": weakref.ref(run), "model": weakref.ref(model), "optimizer": weakref.ref(run.optimizer)}

    plans: list[dict[str, Any]] = [{"data": 2}, {"data": 2, "zero": 2}, {"pipeline": 2, "micro_batches": 2}]
    for plan in [*plans, {"data": 2, "swap": "memory"}]:
        left = used(plan)
        gc.collect()
        kept = [name for name, ref in left.items() if ref() is not None]
        assert not kept, (kept, plan)
