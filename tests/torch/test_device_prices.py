"""Steps of a GPU on paper: a host that starts operators, a device that runs them, and tables of 16 bits."""

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from inside_parallel import (
    CONVOLUTIONS,
    LOW,
    NO_UNIT,
    POINTS,
    PRICED,
    PRODUCTS,
    WHOLE,
    HostStarts,
    OperatorPoint,
    OperatorPrices,
    Parameters,
    RankClock,
    Shapes,
    StageTime,
    TracedOperator,
    TracedStep,
    does_matrices,
    point_of,
    rule_of,
    trace_update,
)
from inside_planner import ComputeCalibration, roofline_of
from unisono.engine.costs.machine import MachineCalibration
from unisono.planner import operator_costs

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
    bound = StageTime()
    for seconds, host in ((0.0, 2.0), (5.0, 1.0), (1.0, 4.0)):  # the device begins late, then is behind
        bound.follow("forward", seconds, host)
    behind = RankClock(queued=True)
    behind.add("forward", 6.0, host=7.0, done=bound.done["forward"])
    assert behind.parts == {"forward": 9.0}  # neither 6 nor 7: 3 of the host, then 6 of the device
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
    started = HostStarts.IN_STEP * HostStarts.OPERATORS["norm"] * (1e-6 + costs.forward_s)
    assert prices.host(wide) == prices.host(narrow) == pytest.approx(started)
    view = wide._replace(size=OperatorPoint(""))
    assert prices.seconds(view) == 0.0
    assert prices.host(view) == pytest.approx(HostStarts.IN_STEP * costs.view_s)


def test_the_update_begins_when_the_host_has_read_the_loss():
    launch_s = 1e-3
    found = forecast(launch_s).seconds
    assert (
        found["update"] + found["fixed"] > launch_s * HostStarts.STEP
    )  # nothing of it hides behind backward


def test_an_update_runs_by_lists_on_a_gpu():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    shapes = Shapes(model)
    with shapes.mode:
        for value in shapes.model.parameters():
            value.grad = torch.empty_like(value)
    named = Parameters(dict(shapes.model.named_parameters()))
    traced = TracedStep(shapes.model)
    with shapes.mode:
        lists, alone = (trace_update(traced, torch.optim.AdamW, named, on_gpu=each) for each in (True, False))
    numel = sum(value.numel() for value in model.parameters())
    lists, alone = ([each for each in found if each.size.kind] for found in (lists, alone))
    assert len(lists) < 16 < len(alone)
    moved = sum(each.size.point[0] for each in lists if each.size.kind == "light")
    heavy = sum(4 * each.size.point[0] for each in lists if each.size.kind == "heavy")
    assert moved + heavy > 60 * numel  # each list is read and written


def test_rows_of_experts_are_a_product():
    rows, stacked = torch.empty(64, 8), torch.empty(4, 8, 16)
    if not hasattr(torch.ops.aten, "_grouped_mm"):
        pytest.skip("this PyTorch has no grouped products")
    point = point_of(torch.ops.aten._grouped_mm.default, (rows, stacked), {}, torch.empty(64, 16))
    assert (point.kind, point.point) == ("product", (64.0, 8.0, 16.0))


def test_batch_norms_are_units_of_their_own_in_bf16():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    batch = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    of = up.StepPredictor(model, batch, loss=functional.cross_entropy, machine=MachineCalibration())
    units = of._parts(up.Plan(precision="bf16")).units[0]
    assert {name: size.number for name, size in units.items()} == {"": 4, "1": 2}
    assert of._parts(up.Plan()).units[0].keys() == {""}


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


def test_an_operand_in_another_order_than_a_large_result_costs_a_line_for_each_element():
    def moved(side: int, *, turned: bool) -> float:
        with torch.device("meta"):
            scores, bias = torch.empty(2, 4, side, side), torch.empty(1, 4, side, side)
            bias = torch.empty(side, side, 4).permute(2, 0, 1)[None] if turned else bias
            kind, (nbytes,), _ = point_of(torch.ops.aten.add.Tensor, (scores, bias), {}, scores + bias)
        assert kind == "light"
        return nbytes

    small, large = 2 * 4 * 64 * 64 * 4, 2 * 4 * 1024 * 1024 * 4
    for turned in (False, True):  # what is next in memory is in a cache still
        assert moved(64, turned=turned) == 2.5 * small
    assert moved(1024, turned=False) == 2.5 * large
    assert moved(1024, turned=True) == (2 + 64 / 4) * large


def test_the_side_of_batched_products_says_their_bytes():
    with torch.device("meta"):
        left, right = torch.empty(6, 32, 8), torch.empty(6, 8, 64)
        kind, (side, work), _ = point_of(torch.ops.aten.bmm.default, (left, right), {}, left @ right)
    elements = left.numel() + right.numel() + 6 * 32 * 64
    assert (kind, work) == ("batched", 2 * 6 * 32 * 8 * 64)
    assert 1.5 * work / side == pytest.approx(elements)


def test_a_device_is_measured_at_points_of_all_classes():
    assert POINTS.keys() == operator_costs.POINTS.keys()
    assert all(len(axes) == len(operator_costs.POINTS[kind]) for kind, axes in POINTS.items())
    assert {kind.removesuffix("_low") for kind in LOW} < POINTS.keys()


def test_each_operator_that_has_a_price_is_cut_or_says_why_not() -> None:
    for name in sorted(PRICED):
        if "backward" in name or not hasattr(torch.ops.aten, name):  # a gradient is cut as its operator is
            continue
        packet = getattr(torch.ops.aten, name)
        ops = [getattr(packet, overload) for overload in packet.overloads()]
        known = f"aten.{name}" in WHOLE or any(rule_of(op) is not None for op in ops)
        assert known, f"aten.{name} has a price, and neither a rule nor a reason in WHOLE: graph/rules.py"


class Vector(nn.Module):
    """Multiplies a matrix by a vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mv(x, x[0])


def test_flops_and_what_selective_recomputation_keeps_follow_from_the_price() -> None:
    assert up.capture(Vector(), torch.ones(3, 4)).flops == 2 * 3 * 4
    kept = {name for name in PRICED if does_matrices(name)}
    assert kept == {name for name in (*PRODUCTS, *CONVOLUTIONS) if "backward" not in name}
    assert does_matrices("_scaled_dot_product_flash_attention_for_cpu")
    assert not does_matrices("_scaled_dot_product_flash_attention_for_cpu_backward")
