"""Forecasts of steps: recorded operators and collectives are those that run; runs tell a difference."""

import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import unisono.parallel as up
from inside_parallel import ForecastCheck, StageStarts, TracedStep, call_of, point_of
from inside_planner import POINTS, ComputeCalibration, roofline
from parallel import models
from parallel.run_features import adamw, made
from unisono.engine.costs.machine import MachineCalibration
from unisono.torch_internals.fake import OperatorMode

WORK = {
    "product", "batched", "convolution", "convolution_backward", "attention", "attention_backward", "norm",
    "norm_backward", "batch_norm", "batch_norm_backward", "softmax", "softmax_backward", "embedding",
    "embedding_backward", "heavy", "sums", "pool", "pool_backward",
}  # fmt: skip
MACHINE = MachineCalibration(cores=2)
COMPUTE = ComputeCalibration("", "", "", 2, (roofline(MACHINE, 1), roofline(MACHINE, 2)))
BATCHES = {
    "gpt": models.text_batches, "mlp": models.vector_batches, "conv": models.image_batches,
    "llama": models.text_batches,
}  # fmt: skip


def predictor(name: str, rows: int = 8) -> up.StepPredictor:
    batch = BATCHES[name](1, rows)[0]
    loss = models.CASES[name].loss
    return up.StepPredictor(
        models.make(name), batch, loss=loss, optimizer=adamw, compute=COMPUTE, machine=MACHINE
    )


def traced(of: up.StepPredictor, plan: up.Plan) -> tuple[TracedStep, list[int]]:
    """A micro-batch of eight rows, and the stage of each module call."""
    starts = of._stages(plan) if plan.pipeline > 1 else StageStarts()
    step = of._traced(plan, 8, starts.opened)
    return step, [*starts.of(step, 8)[0], 0]  # what is before all calls, -1, is in the first stage


class Counted(OperatorMode):
    """Counts the operators of a real step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()
        self.sizes: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            size = point_of(func, args, kwargs or {}, output)
            self.found[size] += size.kind in WORK
            self.sizes.append(size)
        return output


def check_recorded_operators_are_those_of_a_real_step(folder: Path) -> None:
    for name in ("gpt", "conv"):
        model, (x, y) = models.make(name), BATCHES[name](1, 8)[0]
        with Counted() as real:
            models.CASES[name].loss(model(x), y).backward()
        step, _ = traced(predictor(name), up.Plan())
        found = Counter(each.size for each in step.operators if each.size.kind in WORK)
        assert found == +real.found, name
        names = {name for name, value in model.named_parameters() if value.requires_grad}
        assert set(step.homes) == names, name
        many = Counter()
        staged, stages = traced(predictor(name), up.Plan(pipeline=2))
        assert {stages[each.call] for each in staged.operators} == {0, 1}
        for each in staged.operators:
            many[each.size] += each.size.kind in WORK
        assert +many == found, name  # each operator belongs to one stage
        for phase in ("forward", "backward"):
            assert {stages[each.call] for each in staged.operators if each.phase == phase} == {0, 1}, name


def check_calibrated_calls_are_of_the_class_and_size_that_is_priced(folder: Path) -> None:
    wrong = []
    for kind, axes in POINTS.items():
        for at in (0, min(1, len(axes[0]) - 1)):
            wanted = tuple(axis[min(at, len(axis) - 1)] for axis in axes)
            call = call_of(kind, wanted)
            with Counted() as real:
                call()
            sizes = [size.point for size in real.sizes if size.kind == kind]
            assert len(sizes) == 1, (kind, wanted, real.sizes)
            off = max(abs(math.log(found / said)) for found, said in zip(sizes[0], wanted, strict=True))
            if off > math.log(1.6):
                wrong.append((kind, wanted, sizes))
    assert not wrong, wrong


def check_recorded_collectives_are_those_of_a_run(folder: Path) -> None:
    for plan in (up.Plan(tensor=2), up.Plan(tensor=2, sequence=True)):
        batch = models.text_batches(1, 8)[0]
        run = made("gpt", plan, sample=batch[0])
        run.step(batch)
        run.step(batch, watch=True)
        real: Counter[str] = Counter()
        for call in run.explain():
            if call.axis == "tensor" and call.why == "activations of a cut module":
                real[call.operation.strip("_").removesuffix("_base")] += 1
        step, _ = traced(predictor("gpt"), plan)
        said = Counter(move.collective for move in step.moves)
        assert real == said, plan
        assert sum(said.values()) > 16


def check_forecasts_have_every_cause_of_their_plan(folder: Path) -> None:
    of = predictor("gpt", 16)
    plain = of.forecast(up.Plan())
    assert set(plain.seconds) >= {"forward", "backward", "update", "fixed"}
    assert plain.kinds["communication"] == plain.kinds["waiting"] == 0
    for plan, cause in (
        (up.Plan(data=2), "data"),
        (up.Plan(data=2, zero=1), "data"),
        (up.Plan(data=2, zero=3, micro_batches=2), "data"),
        (up.Plan(data=2, precision="bf16"), "data"),
        (up.Plan(tensor=2), "tensor"),
        (up.Plan(pipeline=2, micro_batches=4), "messages"),
        (up.Plan(pipeline=2, micro_batches=4), "waiting"),
        (up.Plan(pipeline=2, micro_batches=4, schedule="zb-h1"), "messages"),
        (up.Plan(recompute=True), "recompute"),
        (up.Plan(recompute="selective"), "recompute"),
        (up.Plan(context=2), "context"),
        (up.Plan(context=2, zero=3), "data"),
        (up.Plan(data=2, local_steps=4), "data"),
        (up.Plan(data=2, compression=up.Compressed("int8")), "data"),
        (up.Plan(swap="disk"), "swap"),
    ):
        found = of.forecast(plan)
        assert found.seconds[cause] > 0, (plan, found)
        assert found.total == pytest.approx(sum(found.seconds.values()))
    full, selective = (
        of.forecast(up.Plan(recompute=each)).seconds["recompute"] for each in (True, "selective")
    )
    assert selective < full == pytest.approx(plain.seconds["forward"], rel=0.2)
    data = of.forecast(up.Plan(data=2)).seconds
    assert data["forward"] < plain.seconds["forward"] * 2
    assert of.forecast(up.Plan(data=2, local_steps=4)).seconds["data"] < data["data"] / 2
    positions = of.forecast(up.Plan(context=2)).seconds
    assert positions["data"] == pytest.approx(data["data"])  # gradients of all parameters, on both
    assert positions["forward"] == pytest.approx(data["forward"], rel=0.1)  # half of the work each


def check_what_cannot_be_priced_is_refused(folder: Path) -> None:
    of = predictor("gpt")
    for plan, says in (
        (up.Plan(data=2, expert=2), "no module of .* is known as a layer of experts"),
        (up.Plan(data=16), "8 rows are too few for 16 data ranks"),
    ):
        with pytest.raises(ValueError, match=says):
            of.forecast(plan)
    with pytest.raises(TypeError, match="model is a int, expected"):
        up.StepPredictor(3, models.vector_batches(1, 4)[0], loss=None)  # type: ignore[arg-type]
    hosts = up.StepPredictor(
        models.make("mlp"), models.vector_batches(1, 4)[0], loss=models.CASES["mlp"].loss, hosts=(0, 1)
    )
    with pytest.raises(ValueError, match="needs 4 ranks, and hosts has 2"):
        hosts.forecast(up.Plan(data=4))
    for seconds, kind, says in (
        ({"magic": 1.0}, ValueError, "no cause 'magic'"),
        ({"forward": -1.0}, ValueError, "forward is -1.0 seconds"),
        ({"forward": float("nan")}, ValueError, "forward is nan seconds"),
        ({"forward": True}, TypeError, "forward is True, expected seconds"),
        ({}, ValueError, "a step of 0 seconds"),
        ([1.0], TypeError, "seconds is a list, expected a dict"),
    ):
        with pytest.raises(kind, match=says):
            up.StepForecast(seconds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_bytes is 0"):
        up.StepForecast({"forward": 1.0}, 0)
    with pytest.raises(TypeError, match="prediction is a float, expected a StepForecast"):
        made("mlp", up.Plan(data=2), prediction=0.1)


def check_a_difference_is_told_once_with_its_cause(folder: Path) -> None:
    batch = models.vector_batches(1, 4)[0]
    for plan, forecast, cause in (
        (up.Plan(data=2), {"forward": 1e-9, "data": 3600.0}, "less .* largest cause is communication"),
        (up.Plan(data=2), {"forward": 3600.0}, "less .* largest cause is compute"),
        (up.Plan(pipeline=2), {"waiting": 3600.0}, "less .* largest cause is waiting"),
        (up.Plan(data=2), {"forward": 1e-9}, "more .* largest cause is"),
    ):
        run = made("mlp", plan, prediction=up.StepForecast(forecast, source="a guess"))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.step(batch, update=False)  # which is not a whole step
            for _ in range(12):
                run.step(batch)
        told = [str(each.message) for each in seen if issubclass(each.category, up.ForecastWarning)]
        assert len(told) == (dist.get_rank() == 0), told
        if told:
            assert re.search(cause, told[0]), told[0]
            assert "a guess" in told[0]


def check_a_step_as_forecast_is_not_told(folder: Path) -> None:
    check = ForecastCheck(up.StepForecast({"forward": 1e-6}), "cpu", far=1e12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [check.step(lambda: 3.0) for _ in range(7)]
    assert losses == [3.0] * 7
    assert check.done
