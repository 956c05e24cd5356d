"""The planner's pipelines beside the schedules that run, and its plans beside `up.Plan`."""

from __future__ import annotations

import pytest

import unisono as un
import unisono.parallel as up
from loops import each
from unisono.parallel.pipeline.schedule import Action, Schedule, schedule
from unisono.parallel.pipeline.timeline import predict
from unisono.planner import TrainingPlan, shape_of
from unisono.planner.stages import in_flight

SIZES = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 2, p, 2 * p, 4 * p)]
SIZES = [(p, v, m) for p, v, m in SIZES if v == 1 or (p > 1 and m % p == 0)]


def made(pipeline: int, interleave: int, micro_batches: int) -> Schedule:
    name = "1f1b" if interleave == 1 else "interleaved"
    return schedule(name, pipeline, micro_batches, interleave)


@each("pipeline, interleave, micro_batches", SIZES)
def test_in_flight_micro_batches_are_the_schedules(
    pipeline: int, interleave: int, micro_batches: int
) -> None:
    plan = TrainingPlan(pipeline=pipeline, interleave=interleave)
    for rank, order in enumerate(made(pipeline, interleave, micro_batches).orders):
        held = most = 0
        for action in order:
            held += {"F": 1, "B": -1}[action.kind]
            most = max(most, held)
        assert in_flight(plan, rank, micro_batches) * interleave == pytest.approx(most)


@each("pipeline, interleave, micro_batches", SIZES)
@each("output_s", [0.0, 0.05, 0.3])
def test_a_step_is_the_schedules(pipeline: int, interleave: int, micro_batches: int, output_s: float) -> None:
    """m slowest ranks and (p-1)/v others: forward 1 s, backward 2 s, and the output on the last stage."""
    last = pipeline * interleave - 1

    def seconds(action: Action) -> float:
        return (1 / interleave + (output_s if action.stage == last else 0)) * {"F": 1, "B": 2}[action.kind]

    expected = predict(made(pipeline, interleave, micro_batches), seconds).span_s
    found = micro_batches * (3 + 3 * output_s) + (pipeline - 1) / interleave * 3
    assert found == pytest.approx(expected, rel=0.02)


SMALL = shape_of("llama", layers=8, hidden=512, heads=8, vocab=1000, sequence=128)


@each(
    "text",
    [
        "tensor=2,pipeline=2,data=2,micro_batch=2,zero=1",
        "pipeline=4,interleave=2,data=2,micro_batch=1,recompute=full",
        "data=8,zero=3",
        "tensor=2,sequence=yes,data=4,micro_batch=2",
    ],
)
def test_a_choice_is_a_plan_of_the_runtime(text: str) -> None:
    choice = un.plan(SMALL, batch=32, gpus=8, hardware="a100-80g", plan=text)
    plan = up.Plan(**choice.runtime_arguments())
    assert plan.ranks == 8
    assert (plan.data, plan.tensor, plan.pipeline) == (
        choice.plan.data, choice.plan.tensor, choice.plan.pipeline,
    )  # fmt: skip
    assert plan.sequence == choice.plan.sequence
    assert plan.micro_batches == 32 // (choice.plan.data * choice.plan.micro_batch)
    assert plan.chunks == choice.plan.interleave
    assert plan.precision == "bf16"


def test_what_the_runtime_lacks_is_refused() -> None:
    shape = shape_of("gpt", layers=8, hidden=512, heads=8, vocab=1000, sequence=128, attention="unfused")
    choice = un.plan(shape, batch=32, gpus=8, hardware="a100-80g", plan="data=8,recompute=selective")
    with pytest.raises(ValueError, match="other operators under recompute=selective"):
        choice.runtime_arguments()
