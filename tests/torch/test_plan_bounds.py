"""No plan that fits and can run is left out of a search by what was found of another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import dry_run, predictor, search
from planned_models import adamw, features, ids, mlp, planned, tokens_loss
from unisono.errors import UnfitError

CROSS = nn.functional.cross_entropy
FEW: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": False, "micro_batches": 2}
"""Fields that leave few plans to search."""


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def wide(**given: Any) -> up.ModelChoice:
    """A choice for a model whose activations take nearly all of its memory."""
    options: dict[str, Any] = {"batch": 4096, "ranks": 1, "optimizer": sgd, **given}
    return planned(**options)


def test_activations_in_f32_say_nothing_of_a_plan_in_bf16() -> None:
    exact, low = (wide(price=up.Plan(precision=each)) for each in ("f32", "bf16"))
    assert low.memory_bytes < 0.7 * exact.memory_bytes
    between = (exact.memory_bytes + low.memory_bytes) // 2
    both = {**FEW, "precision": ["f32", "bf16"], "micro_batches": 1}
    assert wide(memory=between, **both).plan == low.plan


class SomeMoments(torch.optim.Optimizer):
    """Keeps two moments of small matrices and none of large ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for value in self.param_groups[0]["params"]:
            if value.numel() < 10_000 and not self.state[value]:
                self.state[value] = {"first": torch.zeros_like(value), "second": torch.zeros_like(value)}
            value.add_(value.grad, alpha=-0.1)


def test_moments_are_those_of_the_parameters_that_have_some() -> None:
    model = nn.Sequential(nn.Embedding(20_000, 64), nn.Linear(64, 64))
    options: dict[str, Any] = {
        "sample": ids(2), "ranks": 1, "optimizer": SomeMoments, "loss": tokens_loss, "trial": False,
    }  # fmt: skip
    alone = up.plan(model, price=up.Plan(), **options)
    table = 4 * 20_000 * 64
    assert alone.memory_bytes < 2.5 * table
    fields = {**FEW, "micro_batches": 1}
    assert up.plan(model, memory=alone.memory_bytes + 1024, **fields, **options).fits


def test_cuts_that_do_not_fit_refuse_no_others() -> None:
    stages = {**FEW, "pipeline": 2, "schedule": "1f1b"}
    assert planned(**stages, cuts=[(99,), (3,)]).plan.cuts == (3,)
    with pytest.raises(up.NoPlanFitsError, match=r"cuts=\(99,\) do not fit a model of 6 pieces"):
        planned(**stages, cuts=(99,))
    with pytest.raises(ValueError, match=r"cuts=\(99,\) do not fit a model of 6 pieces"):
        planned(price=up.Plan(pipeline=2, cuts=(99,)))


def test_a_module_that_a_run_refuses_under_a_plan_is_refused_under_it() -> None:
    options: dict[str, Any] = {"sample": ids(4), "batch": 8, "optimizer": adamw, "loss": tokens_loss}

    def table(**more: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(64, 16, **more), nn.Linear(16, 64))

    counted = up.plan(
        table(scale_grad_by_freq=True), ranks=1, trial=False, micro_batches=[4, 1], recompute=False, **options
    )
    assert counted.plan.micro_batches == 1
    with pytest.raises(up.NoPlanFitsError, match="max_norm=1"):
        up.plan(table(max_norm=1.0), ranks=2, trial=False, data=2, recompute=False, **options)


def test_gradients_of_a_sparse_embedding_are_dense_as_in_a_run() -> None:
    def peak(**more: Any) -> int:
        model = nn.Sequential(nn.Embedding(20_000, 64, **more), nn.Linear(64, 64))
        options: dict[str, Any] = {"sample": ids(2), "ranks": 1, "optimizer": adamw, "loss": tokens_loss}
        return up.plan(model, price=up.Plan(), trial=False, **options).memory_bytes

    assert peak(sparse=True) == peak()


def test_more_micro_batches_than_are_priced_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches is 1073741824; at most 16384 are priced"):
        planned(batch=1 << 30, micro_batches=1 << 30)
    with pytest.raises(ValueError, match="at most 16384 are priced"):
        planned(batch=1 << 30, price=up.Plan(data=2, micro_batches=1 << 29), ranks=None)


def test_a_model_and_its_settings_stay_as_they_are() -> None:
    class Config:
        use_cache = True

    model = mlp()
    model.config = Config()
    before = torch.get_rng_state()
    up.plan(model, sample=features(4), batch=8, ranks=1, optimizer=adamw, loss=CROSS, **FEW)
    assert model.config.use_cache
    assert torch.equal(torch.get_rng_state(), before)
    assert all(value.grad is None for value in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"price": 5}, "price is a int, expected a Plan"),
        ({"price": up.Plan(data=1 << 40)}, "price has 1099511627776 ranks, expected at most 4096"),
        ({"pieces": "ab"}, "pieces is a str, expected a list of modules"),
        ({"pieces": [1, 2]}, "pieces is a list, expected a list of modules"),
        ({"pieces": [nn.Linear(2, 2)] * 3, "pipeline": 2, "schedule": "1f1b"}, "piece 1 has no module of"),
        ({"optimizer": lambda _: 5}, "optimizer returned a int"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS.step needs a closure"),
        ({"hosts": [up.JobHost(ranks=2)], "ranks": 3}, "hosts have 2 ranks, and ranks is 3"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], says: str) -> None:
    few = {"ranks": None} if "price" in wrong else FEW
    with pytest.raises((TypeError, ValueError), match=says):
        planned(**{**few, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"loss": 5}, {"optimizer": 5}, {"rows": 0}, {"rows": "x"}, {"hosts": (-1,)}, {"speeds": (0.0,)}],
    ids=str,
)
def test_a_predictor_names_a_wrong_argument(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"StepPredictor: {name} is"):
        up.StepPredictor(mlp(), features(4), **{"loss": CROSS, **wrong})


def test_a_predictor_takes_plans_of_its_ranks() -> None:
    of = up.StepPredictor(mlp(), features(4), loss=CROSS, speeds=(1.0, 0.5))
    with pytest.raises(TypeError, match="plan is a str, expected a Plan"):
        of.forecast("data=2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs 1 ranks, and speeds has 2"):
        of.forecast(up.Plan())
    with pytest.raises(ValueError, match=r"speed is 1e\+300, expected 1e-06 to 1e\+06"):
        up.JobHost(ranks=1, speed=1e300)


def test_a_fault_within_the_planner_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no word on a plan: what it befell was left out of the search, and nobody knew."""
    options: dict[str, Any] = {"ranks": 2, "batch": 8, "trial": False, "recompute": False, "micro_batches": 1}
    places = [
        (predictor.StepPredictor, "forecast", {}),
        (search.DryRun, "peak_of", {}),
        (search, "expert_layers", {}),
        (predictor, "first_pieces", {"pipeline": 2, "data": 1}),
        (predictor, "trace_step", {}),
        (dry_run, "micro_batches", {}),
    ]
    for home, name, given in places:
        for fault in (ValueError("not enough values to unpack (expected 3, got 2)"), KeyError("aten.x")):

            def fails(*_: object, fault: Exception = fault, **__: object) -> None:
                raise fault

            with monkeypatch.context() as patched:
                patched.setattr(home, name, fails)
                with pytest.raises(type(fault)) as caught:
                    planned(**{**options, **given})
            assert caught.value is fault, name


def test_what_cannot_be_planned_is_no_fault() -> None:
    """One error class says so, of the model, of its program, of a plan and of its optimizer."""
    refused = [
        lambda: up.Plan(zero=4),
        lambda: up.Plan(data=4, shard=2),
        lambda: planned(ranks=2, price=up.Plan(data=2, expert=2)),
        lambda: planned(ranks=2, price=up.Plan(pipeline=2, cuts=(40,))),
        lambda: planned(ranks=2, batch=1, price=up.Plan(data=2)),
    ]
    for refuse in refused:
        with pytest.raises(UnfitError):
            refuse()
    assert issubclass(up.CaptureError, UnfitError)
    assert issubclass(UnfitError, ValueError)
    odd = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))  # no row alone
    batch = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    options: dict[str, Any] = {"optimizer": adamw, "loss": CROSS, "trial": False, "batch": 2}
    assert up.plan(odd, sample=batch, ranks=1, **options).plan.micro_batches == 1
    with pytest.raises(up.NoPlanFitsError, match="more than 1 value per channel"):
        up.plan(odd, sample=batch, ranks=2, data=2, **options)
