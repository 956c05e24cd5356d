"""Costs of operators as data: interpolation, the roofline, and the file that keeps what was measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from inside_planner import (
    POINTS,
    ComputeCalibration,
    CostTable,
    Measurement,
    OperatorCosts,
    RuntimeCosts,
    SharedSteps,
    compute_file,
    keep_compute,
    middle,
    recall_compute,
    roofline,
)
from loops import each
from unisono.engine.costs.machine import MachineCalibration, identity
from unisono.engine.environment import env

TABLE = CostTable(((1.0, 10.0, 100.0), (2.0, 8.0)), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (1,))
FOUR = MachineCalibration(cores=4)


@each("point, seconds", [((1, 2), 1.0), ((10, 8), 8.0), ((100, 2), 16.0)])
def test_measured_points_are_as_measured(point: tuple[float, float], seconds: float) -> None:
    assert TABLE.at(*point) == pytest.approx(seconds)


def test_between_points_log_seconds_are_linear_in_log_sizes() -> None:
    assert TABLE.at(10**0.5, 2) == pytest.approx(2.0)  # between 1 and 4
    assert TABLE.at(1, 4) == pytest.approx(2**0.5)
    assert TABLE.at(10**0.5, 4) == pytest.approx((1 * 4 * 2 * 8) ** 0.25)


def test_beyond_the_largest_value_seconds_grow_in_proportion_unless_kept() -> None:
    assert TABLE.at(300, 2) == pytest.approx(48.0)
    assert TABLE.at(100, 80) == pytest.approx(32.0)
    assert TABLE.at(0.01, 0.01) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="a point of 1 axes, expected 2"):
        TABLE.at(1.0)


def test_a_roofline_has_every_class_and_grows() -> None:
    for ranks in (1, 2, 4, 8):
        costs = roofline(FOUR, ranks)
        assert costs.sane
        for kind, axes in POINTS.items():
            every = [costs.at(kind, *point) for point in itertools.product(*axes)]
            assert all(0 < seconds < 100 for seconds in every), kind
            assert costs.at(kind, *(axis[-1] for axis in axes)) == max(every), kind
    assert roofline(FOUR, 4).at("product", 512, 512, 512) > roofline(FOUR, 1).at("product", 512, 512, 512)
    with pytest.raises(ValueError, match="no class of operators 'magic'"):
        roofline(FOUR).at("magic", 1.0)


def test_ranks_beyond_the_cores_take_turns() -> None:
    found = ComputeCalibration("", "2", "", 4, (roofline(FOUR, 1), roofline(FOUR, 4)))
    assert found.of(1)[1:] == (1.0, 1.0)
    assert found.of(2) == (found.settings[1], 0.5, 1.0)  # two threads, where one was measured
    assert found.of(4) == (found.settings[1], 1.0, 1.0)
    assert found.of(8) == (found.settings[1], 1.0, 2.0)


def settings_in(folder: Path) -> env.Settings:
    return env.Settings(cache_home=str(folder))


def test_ranks_together_pay_what_the_nearest_measured_ones_do() -> None:
    two, four = SharedSteps(2, 1.1), SharedSteps(4, 1.2, 1.3, 1.1, 1e-3, -1e-4, -1e-4)
    compute = ComputeCalibration("", "", "", 2, (roofline(FOUR),), shared=(two, four))
    assert [compute.together(ranks) for ranks in (2, 4)] == [two, four]
    three, eight = (compute.together(ranks) for ranks in (3, 8))
    assert (three.step_s, three.scale) == (pytest.approx((two.step_s + four.step_s) / 2), four.scale)
    assert eight.step_s == pytest.approx(four.step_s + 2 * (four.step_s - two.step_s))
    assert compute.together(8).sane
    assert compute.together(1) == SharedSteps(1)  # it waits for nobody
    assert two.sane
    assert four.sane
    assert not any(each.sane for each in (SharedSteps(0), SharedSteps(2, 0.0), SharedSteps(2, turn_s=-1.0)))


def test_passes_over_the_jobs_count_by_their_medians() -> None:
    passes = [SharedSteps(2, 1.0 + each / 10, step_s=each * 1e-3) for each in (1, 5, 2)]
    assert middle(passes) == SharedSteps(2, 1.2, step_s=2e-3)


def test_figures_are_the_medians_of_all_times() -> None:
    def at(factor: float) -> Measurement:
        table = CostTable(((1.0, 2.0),), (factor, 2 * factor))
        costs = OperatorCosts(1, 2, {"light": table}, forward_s=factor, scale={"forward": factor})
        return Measurement((costs,), RuntimeCosts(step_s=factor), (SharedSteps(2, 1.0 + factor),))

    found = ComputeCalibration("here", "2.15", "now", 2, ())
    for factor in (0.1, 0.5, 0.2):
        found = found.with_time(at(factor))
    middle_one = at(0.2)
    assert found.settings == middle_one.settings
    assert (found.runtime, found.shared) == (middle_one.runtime, middle_one.shared)
    for _ in range(20):
        found = found.with_time(at(0.7))
    assert found.settings == at(0.7).settings and len(found.times) == 9


def test_types_of_16_bits_may_have_tables_of_their_own() -> None:
    def table(seconds: float) -> CostTable:
        return CostTable(((1.0,),) * 3, (seconds,))

    own = {"product_fp16": table(3.0), "product_low": table(2.0)}
    costs = msgspec.structs.replace(roofline(FOUR), tables=roofline(FOUR).tables | own)
    assert costs.at("product", 1, 1, 1, low="fp16") == pytest.approx(3.0)
    assert costs.at("product", 1, 1, 1, low="bf16") == pytest.approx(2.0)
    assert costs.at("norm", 1e3, low="bf16") == costs.at("norm", 1e3)
    assert costs.sane
    assert not msgspec.structs.replace(costs, tables=costs.tables | {"magic_low": table(1.0)}).sane


def test_a_file_is_read_back_and_another_one_is_ignored(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    assert recall_compute(settings, "2.15.0").source == "a roofline"
    kept = ComputeCalibration(identity(), "2.15.0", "now", 4, (roofline(FOUR),))
    file = compute_file(settings, "2.15.0")
    assert file is not None
    keep_compute(kept, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert recall_compute(settings, "2.15.0").calibration == kept
    assert not recall_compute(settings, "2.14.0").calibration.measured_here
    negative = msgspec.structs.replace(kept.settings[0], forward_s=-1.0)
    for wrong, note in (
        (msgspec.structs.replace(kept, machine="another"), "of another machine or version"),
        (msgspec.structs.replace(kept, settings=()), "numbers that no machine has"),
        (msgspec.structs.replace(kept, settings=(negative,)), "numbers that no machine has"),
    ):
        keep_compute(wrong, file)
        found = recall_compute(settings, "2.15.0")
        assert not found.calibration.measured_here
        assert note in found.note
    file.write_text("{")
    assert "damaged" in recall_compute(settings, "2.15.0").note
    none = env.Settings(cache_home=str(tmp_path), calibration="none")
    assert compute_file(none, "2.15.0") is None
    assert recall_compute(none, "2.15.0").note == ""
