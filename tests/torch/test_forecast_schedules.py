"""A forecast's pipeline takes what the schedule takes on paper; more ranks than cores share them."""

import dataclasses

import msgspec
import pytest
from torch import nn

import unisono.parallel as up
from inside_parallel import (
    COMPARED,
    REPEATED,
    REPLAYED,
    Action,
    ActionWork,
    CollectiveCosts,
    HostPrices,
    OperatorPoint,
    OperatorPrices,
    ParameterSizes,
    RankGroups,
    StageStarts,
    StepParts,
    TracedOperator,
    TracedStep,
    predict,
    proved_schedule,
    shared_time,
    step_forecast,
)
from inside_planner import CostTable, RuntimeCosts, SharedSteps, roofline
from loops import each
from unisono.engine.costs.machine import MachineCalibration

MACHINE = MachineCalibration(cores=8)
NOTHING = RuntimeCosts(*[0.0] * len(RuntimeCosts.__struct_fields__))
SECOND = CostTable(((1.0,),), (1.0,), (0,))
COSTS = msgspec.structs.replace(
    roofline(MACHINE),
    tables={**roofline(MACHINE).tables, "heavy": SECOND, "norm_backward": SECOND},
    forward_s=0.0,
    backward_s=0.0,
)
HEAVY = OperatorPoint("heavy", (1.0,))
PLANS = [
    up.Plan(pipeline=p, micro_batches=m, schedule=name, stages_per_rank=2 if name == "interleaved" else None)
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
    for p in (2, 3, 4)
    for m in (p, 2 * p)
]


def parts(plan: up.Plan, crowd: float = 1.0) -> StepParts:
    """A second forward and two backward on each stage."""
    operators = [  # a module call for each stage
        TracedOperator(HEAVY, phase, stage, "", followed=True)
        for stage in range(plan.stages)
        for phase in ("forward", "backward", "backward")
    ]
    traced = TracedStep(nn.Identity(), operators)
    stages, sent = range(plan.stages), [8] * (plan.stages - 1)
    none: dict[int, dict[str, ParameterSizes]] = {stage: {} for stage in range(plan.stages)}
    prices = CollectiveCosts(MACHINE, (0,) * plan.ranks)
    host = HostPrices(prices, prices, OperatorPrices(COSTS), crowd, SharedSteps(1), RankGroups())
    return StepParts(plan, traced, stages, sent, None, none, ParameterSizes(0, 0), host, NOTHING)


def together(parts: StepParts, shared: SharedSteps) -> StepParts:
    """The same where ranks that train together take so much more."""
    return dataclasses.replace(parts, host=parts.host._replace(shared=shared))


@each("plan", PLANS)
def test_a_step_is_the_schedules(plan: up.Plan) -> None:
    def seconds(action: Action) -> float:
        if action.kind in "IW" and not action.stage:  # no gradients of the model's inputs
            return 2.0 * (action.kind == "W")
        return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind]

    timeline = predict(proved_schedule(plan, plan.micro_batches), seconds)
    found = step_forecast(parts(plan))
    assert found.total == pytest.approx(timeline.span_s, rel=1e-3)
    assert found.seconds["waiting"] / found.total == pytest.approx(timeline.bubble, abs=0.01)


@each("plan", [plan for plan in PLANS if plan.pipeline == 4])
def test_ranks_that_share_cores_take_what_all_compute_or_what_the_schedule_takes(plan: up.Plan) -> None:
    work = 3.0 * plan.stages * plan.micro_batches
    alone = step_forecast(parts(plan)).total
    assert step_forecast(parts(plan, plan.pipeline)).total == pytest.approx(work, rel=1e-3)
    two = step_forecast(parts(plan, plan.pipeline / 2)).total
    assert max(alone, work / 2) * 0.999 < two < max(alone, work / 2) + 3.1  # both are busy a bit later


def test_ranks_of_one_stage_that_share_a_core_compute_half_as_fast() -> None:
    plan = up.Plan(data=2, pipeline=2, micro_batches=4)
    alone = step_forecast(parts(plan)).total
    apart = step_forecast(dataclasses.replace(parts(plan, 2.0), hosts=(0, 0, 1, 1))).total
    assert apart == pytest.approx(2 * alone, rel=1e-3)  # each host has a core, and all ranks of a stage
    mixed = step_forecast(dataclasses.replace(parts(plan, 2.0), hosts=(0, 1, 0, 1))).total
    assert mixed == pytest.approx(2 * 3.0 * plan.micro_batches, rel=1e-3)  # a stage computes while one waits


def test_a_recorded_program_pays_for_each_item_and_each_module() -> None:
    plan = up.Plan(pipeline=2)
    of_pieces, small = parts(plan), OperatorPrices(COSTS).light(1024)
    starts = StageStarts(items=(3, 5), repeated=(0, 2))
    program = dataclasses.replace(of_pieces, starts=starts)
    more = REPLAYED * 8 + REPEATED * 2 + COMPARED  # nn.Identity is one module
    found = step_forecast(program).total - step_forecast(of_pieces).total
    assert found == pytest.approx(more * small, rel=1e-6)


def test_a_split_backward_pays_for_modules_with_weights_and_computes_norms_twice() -> None:
    plan = up.Plan(pipeline=2, schedule="zb-h1")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    whole = together(parts(plan), SharedSteps(2, split_s=0.5))
    homes = {name: (int(name != "0.weight" and name != "0.bias"), "") for name, _ in model.named_parameters()}
    norm = TracedOperator(OperatorPoint("norm_backward", (1.0,)), "backward", 1, "", followed=True)
    traced = dataclasses.replace(
        whole.traced, model=model, homes=homes, operators=[*whole.traced.operators, norm]
    )
    assert step_forecast(whole).total == pytest.approx(1 + 1 + 1 + 2, rel=1e-3)
    found = step_forecast(dataclasses.replace(whole, traced=traced)).total
    each_pass = 1 + 2 * 0.5 + 1  # of the second stage, which has two of the modules
    assert found == pytest.approx(1 + 1 + each_pass + each_pass, rel=1e-3)


def test_no_shared_time_for_nothing() -> None:
    work = ActionWork(1.0, 0.5)
    assert shared_time([[work], [work]], [{0: 1}, {0: 1}], 1.0) == (2.5, [2.0, 2.0])
    assert shared_time([[work], [work]], [{0: 1}, {1: 1}], 1.0) == (1.5, [1.0, 1.0])
    assert shared_time([[], []], [{0: 1}, {0: 1}], 1.0) == (0.0, [1.0, 1.0])
    last = ActionWork(1.0, 0.0, needs="a")
    first = ActionWork(1.0, 0.5, gives="a")
    assert shared_time([[last], [first]], [{0: 1}, {0: 1}], 1.0) == (2.5, [1.0, 1.0])


def test_a_collective_pays_for_its_turn() -> None:
    alone, turns = (CollectiveCosts(MACHINE, (0, 0), turn_s) for turn_s in (0.0, 1e-3))
    for size in (8, 1 << 20):
        more = turns.seconds("all_reduce", (0, 1), size) - alone.seconds("all_reduce", (0, 1), size)
        assert more == pytest.approx(1e-3)
    assert turns.seconds("all_reduce", (0,), 8) == 0.0


def test_groups_of_a_host_share_its_link() -> None:
    machine, size = msgspec.structs.replace(MACHINE, wire_s=1e-5, wire=1e8), 1 << 22
    one = CollectiveCosts(machine, (0, 1)).seconds("all_reduce", (0, 1), size)
    two = CollectiveCosts(machine, (0, 0, 1, 1)).seconds("all_reduce", (0, 2), size)
    assert two == pytest.approx(2 * one, rel=0.05)
    whole = CollectiveCosts(machine, (0, 0, 1, 1))
    assert whole.message(0, 2, size, 2) == pytest.approx(2 * whole.message(0, 2, size, 1), rel=0.01)


def beside(plan: up.Plan, **more: float) -> float:
    """Seconds that figures of steps of two ranks add."""
    said = step_forecast(together(parts(plan), SharedSteps(2, **more)))
    return said.total - step_forecast(parts(plan)).total


def test_ranks_that_train_together_pay_for_it() -> None:
    assert beside(up.Plan(pipeline=2), alone_s=0.5, step_s=0.25) == pytest.approx(0.5)
    assert beside(up.Plan(data=2), alone_s=0.5, step_s=0.25) == pytest.approx(0.25)
    fixed = step_forecast(parts(up.Plan(pipeline=2))).seconds["fixed"]
    assert -fixed <= beside(up.Plan(pipeline=2), alone_s=-0.9) <= 0
    ends = beside(up.Plan(pipeline=2), message_s=0.25)
    assert ends > 0 and ends == pytest.approx(round(ends / 0.25) * 0.25)
