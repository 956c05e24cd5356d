"""`up.plan`: the memory of a plan by a dry run, and the choice that follows from it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import suite
import unisono.parallel as up
from inside_parallel import KINDS as KINDS_OF_SCHEDULES
from inside_parallel import MIB, CachingAllocator, DryRun, TrainingTask, allowed, predictor, trace_step
from planned_models import KINDS, MODELS, adamw, features, gpt, ids, measured, mlp, planned, tokens_loss

CROSS = nn.functional.cross_entropy


@pytest.mark.parametrize("name", list(MODELS))
def test_a_dry_run_has_the_peak_of_a_step_with_values(name: str) -> None:
    make, loss, batch = MODELS[name]
    model, sample = make(), batch(8)
    (peak,) = DryRun(TrainingTask(model, sample, 8, adamw, loss), up.Plan()).peaks()
    assert all(value.grad is None for value in model.parameters())
    assert abs(peak.nbytes - measured(model, loss, sample)) <= 512
    assert sum(peak.parts.values()) == peak.nbytes == peak.reserved
    assert peak.parts["parameters"] == 4 * sum(value.numel() for value in model.parameters())
    assert abs(peak.parts["moments"] - 2 * peak.parts["parameters"]) < 512  # and the steps of AdamW


def test_the_peak_has_its_module_and_line() -> None:
    task = TrainingTask(gpt(), ids(64), 64, adamw, tokens_loss)
    (peak,) = DryRun(task, up.Plan()).peaks()
    assert str(peak.place).startswith('backward in "'), peak.place
    assert peak.parts["activations"] > peak.nbytes / 2


def test_plans_keep_what_they_say() -> None:
    task = TrainingTask(mlp(), features(16), 16, adamw, CROSS)
    whole = 4 * task.parameters
    alone = DryRun(task, up.Plan(data=4)).peaks()[0].parts
    shared = DryRun(task, up.Plan(data=4, zero=3)).peaks()[0].parts
    assert alone["parameters"] == whole
    assert abs(shared["parameters"] / whole - 1 / 4) < 0.01
    assert abs(shared["moments"] / (2 * whole) - 1 / 4) < 0.01
    first, last = DryRun(task, up.Plan(pipeline=2, micro_batches=4, cuts=(3,))).peaks()
    assert first.parts["parameters"] + last.parts["parameters"] == whole
    parts = DryRun(task, up.Plan(tensor=2)).peaks()[0].parts
    assert parts["parameters"] < 0.6 * whole


def test_recomputation_and_small_micro_batches_need_less() -> None:
    task = TrainingTask(gpt(), ids(32), 32, adamw, tokens_loss)
    texts = ({}, {"recompute": "selective"}, {"recompute": True}, {"recompute": True, "micro_batches": 8})
    bytes_of = [DryRun(task, up.Plan(**each)).peaks()[0].nbytes for each in texts]
    assert bytes_of == sorted(bytes_of, reverse=True), bytes_of
    assert len(set(bytes_of)) == len(bytes_of)


def test_many_micro_batches_need_what_some_need() -> None:
    few, many = (
        DryRun(TrainingTask(mlp(), features(rows), rows, adamw, CROSS), plan).peaks()
        for rows, plan in (
            (12, up.Plan(pipeline=2, micro_batches=6, cuts=(3,))),
            (80, up.Plan(pipeline=2, micro_batches=40, cuts=(3,))),
        )
    )
    for one, other in zip(few, many, strict=True):
        assert one.nbytes - one.parts["inputs"] == other.nbytes - other.parts["inputs"]


def test_all_micro_batches_of_gpipe_are_in_memory_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS_OF_SCHEDULES, "forwards first", KINDS_OF_SCHEDULES["gpipe"])

    def peak(schedule: str, parts: int) -> int:
        plan = up.Plan(pipeline=2, micro_batches=parts, cuts=(3,), schedule=schedule)
        return DryRun(TrainingTask(gpt(), ids(parts), parts, adamw, tokens_loss), plan).peak_of(0).nbytes

    assert peak("1f1b", 6) < 1.05 * peak("1f1b", 4)
    most = peak("gpipe", 6)
    assert most > 1.1 * peak("gpipe", 4)
    assert peak("forwards first", 6) == most


def test_micro_batches_of_other_sizes_have_their_own_messages() -> None:
    task = TrainingTask(mlp(), features(7), 7, adamw, CROSS)
    peaks = DryRun(task, up.Plan(pipeline=2, micro_batches=3, cuts=(3,))).peaks()
    assert all(peak.nbytes > 0 for peak in peaks)


def test_what_is_swapped_is_in_memory_unit_by_unit() -> None:
    task = TrainingTask(mlp(), features(16), 16, adamw, CROSS)
    whole = 4 * task.parameters
    parts = DryRun(task, up.Plan(data=2, swap="disk")).peaks()[0].parts
    assert parts["parameters"] < 0.5 * whole
    assert parts["moments"] < 0.5 * whole
    kept = DryRun(task, up.Plan(swap="memory")).peaks()[0]  # of the host, where the model is
    assert kept.parts["moments"] + kept.parts["buffers"] > 2 * whole


def test_replicas_that_meet_keep_anchors_and_a_momentum() -> None:
    task = TrainingTask(mlp(), features(16), 16, adamw, CROSS)
    averaged, alone = (
        DryRun(task, up.Plan(data=2, **more)).peaks()[0].parts for more in ({}, {"local_steps": 4})
    )
    assert alone["moments"] - averaged["moments"] == pytest.approx(3 * 4 * task.parameters, rel=0.01)


def test_positions_and_experts_are_on_several_ranks() -> None:
    whole = TrainingTask(gpt(), ids(16), 16, adamw, tokens_loss)
    alone, cut = (DryRun(whole, up.Plan(**more)).peaks()[0].parts for more in ({}, {"context": 2}))
    assert cut["activations"] < 0.7 * alone["activations"]
    assert cut["parameters"] == alone["parameters"]
    model, loss, batch = KINDS["moe"]
    task = TrainingTask(model(), batch(16), 16, adamw, loss)
    alone = DryRun(task, up.Plan()).peaks()[0].parts
    spread = DryRun(task, up.Plan(data=2, expert=2)).peaks()[0].parts
    experts = sum(v.nbytes for name, v in task.model.named_parameters() if "experts" in name)
    assert alone["parameters"] - spread["parameters"] == experts / 2
    with pytest.raises(ValueError, match="no layers of stacked experts"):
        DryRun(TrainingTask(gpt(), ids(8), 8, adamw, tokens_loss), up.Plan(data=2, expert=2)).peaks()
    with pytest.raises(ValueError, match="tensor=2: its memory is not predicted"):
        DryRun(task, up.Plan(data=2, expert=2, tensor=2)).peaks()


# ---- the allocator ----


def test_blocks_are_cut_from_segments_and_join_again() -> None:
    allocator = CachingAllocator()
    small, large, huge = (allocator.allocate(n) for n in (100, 3 * MIB, 33 * MIB + 1))
    assert (small.size, large.size, huge.size) == (512, 3 * MIB, 34 * MIB)
    assert allocator.reserved == 2 * MIB + 20 * MIB + 34 * MIB
    allocator.release(large, small=False)
    again = allocator.allocate(18 * MIB)
    assert allocator.reserved == 56 * MIB  # of the same segment
    allocator.release(again, small=False)
    other = allocator.allocate(3 * MIB, stream=1)
    assert allocator.reserved == 76 * MIB  # another stream has its own
    allocator.release(other, small=False)


def test_a_limit_first_frees_what_is_cached() -> None:
    allocator = CachingAllocator(limit=60 * MIB)
    block = allocator.allocate(40 * MIB)
    allocator.release(block, small=False)
    allocator.allocate(50 * MIB)
    assert allocator.exceeded == 0
    assert allocator.reserved == 50 * MIB
    allocator.allocate(30 * MIB)
    assert allocator.exceeded == 20 * MIB
    assert allowed(1 << 30) == pytest.approx(970.8 * MIB, rel=1e-4)


# ---- seconds ----


class Pairs(nn.Linear):
    """Compares each row with each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (y @ y.T).mean(1, keepdim=True).expand(-1, 10)


@pytest.mark.parametrize(("make", "recorded"), [(mlp, 3), (lambda: Pairs(256, 64), 4)])
def test_other_rows_follow_from_those_that_were_recorded(
    make: Callable[[], nn.Module], recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: list[int] = []

    def trace(shapes: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        count.append(len(batch[0]))
        return trace_step(shapes, batch, *rest, **more)

    monkeypatch.setattr(predictor, "trace_step", trace)
    of = up.StepPredictor(make(), features(512), loss=CROSS, optimizer=adamw)
    for parts in (1, 2, 4, 32):
        plan = up.Plan(micro_batches=parts)
        alone = up.StepPredictor(make(), features(512), loss=CROSS, optimizer=adamw)
        said = of.forecast(plan)
        assert said.total == pytest.approx(alone.forecast(plan).total, rel=0.01)
        count.pop()  # that of `alone`
    assert len(count) == recorded


# ---- the choice ----


@pytest.mark.slow
def test_all_axes_are_searched_and_swapping_is_for_what_fits_no_other_plan() -> None:
    options: dict[str, Any] = {"optimizer": adamw, "loss": tokens_loss, "batch": 16, "ranks": 2}
    free = up.plan(gpt(), sample=ids(4), **options)
    tried = [free.plan, *(each.plan for each in free.next_best)]
    assert all((each.expert, each.swap) == (1, None) for each in tried)
    assert any("context" in each.change for each in free.refused) or free.plan.context > 1
    assert not any("expert" in each.change or "swap" in each.change for each in free.refused)
    given: dict[str, Any] = {"tensor": 1, "pipeline": 1, "recompute": False, "micro_batches": 1, "zero": 0}
    least = planned(**given).memory_bytes
    assert planned(**given, memory=least - 4096).plan.swap == "disk"
    assert planned(swap="disk").plan.swap == "disk"


def test_all_ranks_have_as_many_micro_batches_as_the_rank_with_fewest_rows() -> None:
    task = TrainingTask(mlp(), features(13), 13, adamw, CROSS)
    predictor = up.StepPredictor(mlp(), features(13), loss=CROSS, optimizer=adamw)
    few, one = (up.Plan(data=8, micro_batches=parts) for parts in (4, 1))  # two rows, or one
    assert DryRun(task, few).peak_of(0).nbytes == DryRun(task, one).peak_of(0).nbytes
    assert predictor.forecast(few).total == predictor.forecast(one).total


def test_a_choice_fits_and_says_why() -> None:
    given: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "batch": 256, "micro_batches": 1}
    whole = planned(**given, memory="64M")
    assert whole.fits
    assert whole.plan.ranks == 2
    tight = planned(**given, memory=whole.memory_bytes - 4096)
    assert tight.fits
    assert tight.memory_bytes < whole.memory_bytes
    text = str(tight)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    assert any(each.excess_bytes > 0 for each in tight.refused), text
    assert "too many" in text
    assert f"limit: {tight.NAMES[tight.limit]}" in text
    page = tight.html()
    assert "too many" in page
    assert str(tight.plan) in page
    assert tight.record()["plan"] == str(tight.plan)
    assert all(each.problem or each.excess_bytes or each.excess_s >= 0 for each in tight.refused), text
    with pytest.raises(up.NoPlanFitsError, match="ranks fits into 1000 B"):
        planned(memory=1000)


def test_one_plan_is_priced() -> None:
    plan = up.Plan(data=2, zero=3)
    choice = planned(price=plan, trial=False)
    assert choice.plan == plan
    assert choice.candidates == 1
    said = up.StepPredictor(mlp(), features(16), loss=CROSS, optimizer=adamw).forecast(plan)
    assert choice.seconds == pytest.approx(said.total, rel=1e-6)  # of a sample of four rows
    assert choice.forecast.seconds == pytest.approx(said.seconds)
    assert choice.forecast.memory_bytes == choice.chosen.peak.nbytes
    assert not planned(price=plan, memory=1000).fits


def spin(seconds: float) -> None:
    """Compute for so long."""
    stop = time.thread_time() + seconds
    while time.thread_time() < stop:
        pass


class Waiting(nn.Module):
    """A module whose Python takes long, of which its operators tell nothing."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(256, 256), fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(2e-3)
        if self.fails and not isinstance(x, FakeTensor):
            raise RuntimeError("not for these values")
        return self.layer(nn.functional.dropout(x, 0.1))


def test_a_trial_shows_what_the_models_own_python_takes() -> None:
    model = nn.Sequential(Waiting(), nn.Linear(256, 10))
    told = {}
    for trial in (False, True):
        before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
        of = up.StepPredictor(model, features(16), loss=CROSS, optimizer=adamw, hosts=(0, 0), trial=trial)
        told[trial] = of.forecast(up.Plan(data=2)).seconds["forward"]
        assert torch.equal(torch.get_rng_state(), before[0])
        assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
        assert all(value.grad is None for value in model.parameters())
    assert 1.8e-3 < told[True] - told[False] < 2e-2
    fails = nn.Sequential(Waiting(fails=True), nn.Linear(256, 10))
    of = up.StepPredictor(fails, features(16), loss=CROSS, optimizer=adamw, hosts=(0, 0), trial=True)
    assert of.forecast(up.Plan(data=2)).seconds["forward"] == pytest.approx(told[False])
    scale = nn.Parameter(torch.ones(()))
    of = up.StepPredictor(
        model, features(16), loss=lambda y, t: CROSS(y * scale, t), optimizer=adamw, trial=True
    )
    assert of.forecast(up.Plan()).seconds["forward"] > told[False]
    assert scale.grad is None
    scale.grad = torch.ones(())
    planned(loss=lambda y, t: CROSS(y * scale, t), trial=True)
    assert type(scale.grad) is torch.Tensor and scale.grad == 1.0
    with pytest.raises(TypeError, match="trial is 1"):
        planned(trial=1)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"batch": 0}, ValueError, "batch is 0"),
        ({"ranks": 1.5}, ValueError, "ranks is 1.5"),
        ({"memory": "much"}, ValueError, "memory is 'much'"),
        ({"memory": -1}, ValueError, "memory is -1"),
        ({"hosts": 3}, ValueError, "not evenly"),
        ({"sample": torch.ones(2, 256)}, ValueError, "sample is a batch"),
        ({"optimizer": 3}, TypeError, "plan: optimizer is a int"),
        ({"elastic": True}, ValueError, "not predicted"),
        ({"expert": 2}, up.NoPlanFitsError, "no module of Sequential is known as a layer of experts"),
        ({"stages": 2}, TypeError, "neither an argument"),
        ({"zero": 7}, ValueError, "zero is 7"),
        ({"zero": [1, "2"]}, TypeError, "zero is '2'"),
        ({"precision": []}, ValueError, "empty list"),
        ({"compression": "int8"}, TypeError, "compression is 'int8'"),
        ({"ranks": 10**12}, ValueError, "ranks is 1000000000000"),
        ({"batch": 10**30}, ValueError, "batch is 10"),
        ({"hosts": [1, 2]}, ValueError, "hosts have 3 ranks, and ranks is 2"),
        ({"hosts": [0, 2]}, ValueError, "ranks is 0"),
        ({"hosts": [1, "b"]}, TypeError, "ranks is 'b'"),
        ({"hosts": 0}, ValueError, "hosts is 0"),
        ({"weigh": "label"}, ValueError, "weigh is 'label'"),
        ({"price": 0}, TypeError, "price is a int"),
        ({"price": up.Plan(data=2), "zero": 1}, ValueError, "price is a plan, which has its zero"),
        ({"price": up.Plan(data=2), "zeros": 1}, TypeError, "zeros is neither an argument"),
        ({"price": up.Plan(data=4)}, ValueError, "price has 4 ranks, and ranks is 2"),
        ({"batch": 1, "data": 2}, up.NoPlanFitsError, "no plan of 2 ranks can run"),
        ({"zero": 3, "data": 1}, up.NoPlanFitsError, "no plan of 2 ranks"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        planned(**given)


def test_a_step_that_reads_values_is_refused() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)

    options: dict[str, Any] = {"sample": features(4), "optimizer": adamw, "ranks": 1}
    with pytest.raises(up.CaptureError, match=r"test_planning.py.*write up.Plan\(data"):
        up.plan(Reads(256, 10), loss=CROSS, **options)
    with pytest.raises(up.CaptureError, match="reads values"):
        up.plan(mlp(), loss=lambda y, t: CROSS(y, t) * y.sum().item(), price=up.Plan(), **options)


def test_what_this_package_raises_in_a_recorded_step_is_no_capture_error() -> None:
    with pytest.raises(TypeError, match="this FakeTensor has none: give the model labels"):
        up.plan(mlp(), sample=features(4)[0], loss=None, optimizer=adamw, price=up.Plan())


def test_a_sample_that_the_model_does_not_take_is_told_so() -> None:
    batch = torch.randn(4, 3), torch.arange(4) % 2
    with pytest.raises(up.CaptureError, match=r"Look whether the model takes the inputs of sample="):
        up.plan(nn.Linear(5, 2), sample=batch, optimizer=adamw, loss=CROSS, ranks=2, memory="1G")


def test_auto_needs_a_batch() -> None:
    with pytest.raises(ValueError, match="write sample="):
        up.parallelize(mlp(), "auto", optimizer=adamw, loss=CROSS)
    with pytest.raises(TypeError, match="plan is a str"):
        up.parallelize(mlp(), "best", optimizer=adamw, loss=CROSS)


@pytest.mark.slow
def test_a_job_trains_by_what_it_chose(forks: suite.Forks, tmp_path: Any) -> None:
    (texts,) = forks.run(tmp_path, {"auto": ("parallel.chosen", 2, [])}).values()
    assert all("trained" in text and "ended with" not in text for text in texts), texts
