"""Steps of a GPU on paper: a host that starts operators, a device that runs them, and tables of 16 bits."""

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from unisono.engine.costs.machine import MachineCalibration
from unisono.parallel.costs.operator_kinds import OperatorPoint, point_of
from unisono.parallel.costs.operator_prices import OperatorPrices
from unisono.parallel.costs.rank_clock import RankClock
from unisono.parallel.costs.traced_step import NO_UNIT, TracedOperator
from unisono.parallel.planning.device_costs import LOW, POINTS
from unisono.planner import operator_costs
from unisono.planner.compute_calibration import ComputeCalibration
from unisono.planner.operator_costs import roofline_of

COSTS = roofline_of(5e13, 1.5e12, 1e-6)


def forecast(launch_s: float | None, **plan: object) -> up.StepForecast:
    costs = msgspec.structs.replace(COSTS, launch_s=launch_s)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    return up.StepPredictor(
        model, batch, loss=functional.cross_entropy, own_device=True, machine=MachineCalibration(),
        optimizer=torch.optim.AdamW, compute=ComputeCalibration("", "", "", 1, (costs,)),
    ).forecast(up.Plan(**plan))  # fmt: skip


def test_a_device_waits_for_its_host_and_a_host_does_not_wait_for_its_device():
    rank = RankClock(queued=True)
    rank.add("forward", 5.0, host=1.0)
    rank.add("backward", 1.0, host=2.0)  # queued long before the device ends forward
    assert (rank.clock, rank.host) == (6.0, 3.0)
    rank.add("update", 1.0, host=9.0)  # ends with the host
    assert rank.parts == {"forward": 5.0, "backward": 1.0, "update": 6.0}
    alone = RankClock()
    alone.add("forward", 5.0, host=1.0)
    assert alone.parts == {"forward": 6.0}


@pytest.mark.parametrize("plan", [{}, {"micro_batches": 4}, {"recompute": True}, {"precision": "bf16"}])
def test_a_slow_host_sets_the_pace_of_a_small_step(plan):
    fast, slow, slower = (forecast(launch_s, **plan).total for launch_s in (1e-9, 1e-3, 2e-3))
    assert fast < slow < slower < 2.01 * slow


def test_sixteen_bits_have_tables_of_their_own():
    low = {"norm_low": operator_costs.CostTable(((1.0,),), (1.0,))}
    costs = msgspec.structs.replace(COSTS, tables=COSTS.tables | low, launch_s=1e-6)
    prices = OperatorPrices(costs)
    wide, narrow = (
        TracedOperator(OperatorPoint("norm", (1.0,), low), "forward", 0, NO_UNIT, True)
        for low in ("", "bf16")
    )
    assert prices.seconds(narrow) == 1.0 > prices.seconds(wide)
    assert prices.host(wide) == prices.host(narrow) == 1e-6 + costs.forward_s
    view = wide._replace(size=OperatorPoint(""))
    assert prices.seconds(view) == 0.0


def test_points_of_operators_say_whether_they_are_of_sixteen_bits():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8, 16, dtype=dtype)
        low = "bf16" if dtype == torch.bfloat16 else ""
        assert point_of(torch.ops.aten.gelu.default, (x,), {}, x).low == low
        out, weight = torch.randn(1, 4, 6, 6, dtype=dtype), torch.randn(4, 3, 3, 3, dtype=dtype)
        image = torch.randn(1, 3, 6, 6, dtype=dtype)
        args = (out, image, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        found = point_of(torch.ops.aten.convolution_backward.default, args, {}, (image, weight))
        assert found.kind == "convolution_backward"
        assert found.low == low


def test_a_device_is_measured_at_points_of_all_classes():
    assert POINTS.keys() == operator_costs.POINTS.keys()
    assert all(len(axes) == len(operator_costs.POINTS[kind]) for kind, axes in POINTS.items())
    assert {kind.removesuffix("_low") for kind in LOW} < POINTS.keys()
