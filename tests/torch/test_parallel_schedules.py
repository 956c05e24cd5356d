"""Schedules as lists: proved for many sizes, broken ones refused, bubbles by formula, pictures."""

import dataclasses
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import unisono.parallel as up
from inside_parallel import KINDS, Action, Schedule, predict, prove, schedule
from loops import each
from unisono.errors import PlanError

NAMES = (*KINDS,)
UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def made(name: str, ranks: int, micro_batches: int) -> Schedule:
    return schedule(name, ranks, micro_batches, 2 if name == "interleaved" else 1)


@each("name", NAMES)
@each("ranks", [1, 2, 3, 4, 8])
def test_every_schedule_is_proved(name: str, ranks: int) -> None:
    for micro_batches in range(1, 18):
        prove(made(name, ranks, micro_batches))


def test_every_schedule_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "plans.md").read_text()
    for name in NAMES:
        assert f"| `{name}`" in page, f"docs/plans.md: the table under ## Pipelines has no row of {name}"
        assert re.search(rf"schedule: .*\b{name}\b", up.Plan.__doc__ or ""), f"Plan: schedule names no {name}"


IDEAL = {  # bubble of p ranks and m micro-batches when F = I = W and B = I + W, with two stages on a rank
    "gpipe": lambda p, m: (p - 1) / (m + p - 1),
    "1f1b": lambda p, m: (p - 1) / (m + p - 1),
    "interleaved": lambda p, m: (p - 1) / (2 * m + p - 1),
    "zb-h1": lambda p, m: (p - 1) / (3 * m + p - 1),
    "zbv": lambda p, m: (p - 1) / (6 * m + p - 1),
}


@each("name", IDEAL)
@each(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_is_the_formulas(name: str, ranks: int, micro_batches: int) -> None:
    timeline = predict(made(name, ranks, micro_batches), UNIT)
    ideal = IDEAL[name](ranks, micro_batches)
    # zbv is found by search: up to one unit of 6m + p - 1 more
    slack = 1 / (6 * micro_batches + ranks - 1) if name == "zbv" else 1e-9
    assert ideal - 1e-9 <= timeline.bubble <= ideal + slack


@each("name", ["1f1b", "zb-h1"])
def test_in_flight_micro_batches_are_bounded(name: str) -> None:
    made_ = made(name, 4, 16)
    for rank, order in enumerate(made_.orders):
        held = most = 0
        for action in order:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most <= (4 - rank if name == "1f1b" else 4)


def swapped(broken: Schedule, rank: int, first: int, second: int) -> Schedule:
    order = list(broken.orders[rank])
    order[first], order[second] = order[second], order[first]
    orders = list(broken.orders)
    orders[rank] = tuple(order)
    return dataclasses.replace(broken, orders=tuple(orders))


def test_a_deadlock_is_refused_and_named() -> None:
    good = schedule("1f1b", 2, 4)
    # rank 0 wants the gradient of micro-batch 0 before it sends its activations
    order = (Action("F", 0, 1), Action("F", 0, 0), *good.orders[0][2:])
    with pytest.raises(PlanError, match="sends activations of micro-batch 1 from stage 0 first"):
        prove(dataclasses.replace(good, orders=(order, good.orders[1])))
    late = (*good.orders[0][1:3], good.orders[0][0], *good.orders[0][3:])
    with pytest.raises(PlanError, match="goes backward first"):
        prove(dataclasses.replace(good, orders=(late, good.orders[1])))
    # both ranks wait for each other: rank 0 for a gradient, rank 1 for activations sent after it
    first = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    second = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    with pytest.raises(
        PlanError, match=r"deadlock: rank 0 at B0 of stage 0 waits for gradients of micro-batch 0"
    ):
        prove(Schedule("mine", (tuple(first), tuple(second)), (0, 1), 2))


def test_missing_double_and_foreign_actions_are_refused() -> None:
    good = schedule("gpipe", 2, 2)
    with pytest.raises(PlanError, match=r"micro-batch 1 of stage 1 has \['F'\]"):
        prove(dataclasses.replace(good, orders=(good.orders[0], good.orders[1][:-1])))
    with pytest.raises(PlanError, match="comes twice"):
        prove(dataclasses.replace(good, orders=(good.orders[0], (*good.orders[1], Action("B", 1, 1)))))
    with pytest.raises(PlanError, match="no stage of this rank|not a stage of this rank"):
        prove(dataclasses.replace(good, orders=(good.orders[1], good.orders[0])))


def test_pictures() -> None:
    timeline = predict(schedule("1f1b", 2, 3), {"F": 1.0, "B": 1.0})
    assert timeline.span_s == 8
    assert timeline.bubble == pytest.approx(1 / 4)
    text = timeline.text(width=8)
    assert text.splitlines()[0] == "rank 0 |01.a2b.c|"
    assert text.splitlines()[1] == "rank 1 |.0a1b2c.|"
    drawn = ET.fromstring(timeline.svg())
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}rect")) == 12
