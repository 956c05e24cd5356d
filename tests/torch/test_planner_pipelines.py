"""The planner's pipelines beside the schedules that run, and its plans beside `up.Plan`."""

from __future__ import annotations

import pytest

import unisono as un
import unisono.parallel as up
from inside_parallel import Action, Schedule, predict, schedule
from inside_planner import PlanModel, PlanTree, in_flight, price
from loops import each
from unisono.planner import ExpertShape, TrainingPlan, shape_of

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


@each("pipeline, micro_batches", [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 4 * p)])
def test_zb_h1_is_the_schedule(pipeline: int, micro_batches: int) -> None:
    """In flight, and the bubble (p-1) (F + max(0, I-W)), for passes of equal and other lengths."""
    made_schedule = schedule("zb-h1", pipeline, micro_batches)
    plan = TrainingPlan(pipeline=pipeline, schedule="zb-h1")
    for rank, order in enumerate(made_schedule.orders):
        held = most = 0
        for action in order:
            held += {"F": 1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert in_flight(plan, rank, micro_batches) == most
    for inputs, weights in ((1.0, 1.0), (1.2, 0.8), (1.5, 0.7), (0.9, 1.3)):
        passes = {"F": 1.0, "I": inputs, "W": weights}
        found = predict(made_schedule, lambda action, passes=passes: passes[action.kind]).span_s
        bubble = (pipeline - 1) * (1 + max(0.0, inputs - weights))
        assert found == pytest.approx(micro_batches * (1 + inputs + weights) + bubble, rel=0.02)


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
        "data=8,zero=2,shard=4",
        "data=2,context=4,zero=3",
        "pipeline=4,data=2,micro_batch=2,schedule=zb-h1",
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
    assert (plan.context, plan.zero, plan.shard or 0) == (
        choice.plan.context, choice.plan.zero, choice.plan.shard,
    )  # fmt: skip
    assert plan.schedule == ("interleaved" if choice.plan.interleave > 1 else choice.plan.schedule)


def test_what_the_runtime_lacks_is_refused() -> None:
    shape = shape_of("gpt", layers=8, hidden=512, heads=8, vocab=1000, sequence=128, attention="unfused")
    choice = un.plan(shape, batch=32, gpus=8, hardware="a100-80g", plan="data=8,recompute=selective")
    with pytest.raises(ValueError, match="other operators under recompute=selective"):
        choice.runtime_arguments()


def test_experts_and_swapping_are_plans_of_the_runtime() -> None:
    experts = ExpertShape(count=8, top_k=2, ffn=256)
    shape = shape_of("llama", layers=4, hidden=256, heads=8, vocab=1000, sequence=128, experts=experts)
    choice = un.plan(shape, batch=32, gpus=8, hardware="a100-80g", plan="expert=4,zero=1")
    assert up.Plan(**choice.runtime_arguments()).expert == 4
    choice = un.plan(SMALL, batch=32, gpus=8, hardware="a100-80g", plan="swap=states", compute="f32")
    assert up.Plan(**choice.runtime_arguments()).swap == "memory"
    for text, message in (("swap=moments", "swaps all states or none"), ("codec=int8", "up.Compressed")):
        choice = un.plan(SMALL, batch=32, gpus=8, hardware="a100-80g", plan=text)
        with pytest.raises(ValueError, match=message):
            choice.runtime_arguments()


@each("experts", [None, ExpertShape(count=4, top_k=2, ffn=256)])
def test_a_search_for_the_runtime_finds_the_best_of_what_it_runs(experts: ExpertShape | None) -> None:
    shape = shape_of("llama", layers=4, hidden=256, heads=4, vocab=1000, sequence=128, experts=experts)
    given = {"batch": 8, "gpus": 4, "hardware": "a100-80g", "compute": "f32"}
    choice = un.plan(shape, **given, runtime=up.Plan)
    job = choice.job
    plans = [plan for plan in PlanTree(job, {}) if not plan.problem(job, up.Plan)]
    assert choice.candidates == len(plans) < len(list(PlanTree(job, {})))
    fitting = sorted((price(PlanModel(job), plan) for plan in plans), key=lambda each_: each_.order)
    assert [choice.chosen, *choice.next_best] == fitting[:6]
    for refused in choice.refused:
        assert "codec" not in refused.change
    with pytest.raises(ValueError, match="tensor"):
        un.plan(shape, **given, runtime=up.Plan, fix="swap=states,tensor=2")
