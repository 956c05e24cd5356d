"""What `up.plan` compares and searches: plans, lists of values, hosts that differ, rows of experts."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import (
    CollectiveCosts,
    DrawnRows,
    DryRun,
    JobHost,
    JobMachine,
    PlanSearch,
    RankGroups,
    TrainingTask,
    _of_control_groups,
    changes,
    neighbours,
    plans,
)
from planned_models import adamw, features, mlp, planned
from unisono.engine.costs.machine import MachineCalibration

CROSS = nn.functional.cross_entropy


def test_a_list_of_values_is_searched() -> None:
    codecs = [None, up.Compressed("int8"), up.PowerSGD(rank=2)]
    given: dict[str, Any] = {"data": 2, "zero": 0, "recompute": False, "micro_batches": 1}
    choice = planned(**given, compression=codecs, local_steps=[None, 8])
    assert choice.candidates == 6
    tried = [choice.plan, *(each.plan for each in choice.next_best)]
    assert {each.compression for each in tried} == {*codecs}
    assert {each.local_steps for each in tried} == {None, 8}
    assert any("compression=" in each.change for each in choice.refused)
    one = list(plans(1, 4, {"compression": codecs}, host=1))
    assert {each.compression for each in one} == {None}  # nothing travels
    alone = planned(**given, compression=codecs[1])
    assert alone.plan.compression == codecs[1]
    assert planned(**given).plan.compression is None
    low = planned(**given, precision=["f32", "bf16"])
    assert {low.plan.precision, *(each.plan.precision for each in low.next_best)} == {"f32", "bf16"}


def test_compressed_units_keep_whole_errors_or_those_of_rows() -> None:
    """In `buffers` of a dry run, and in what the priced step sends."""
    task, low = TrainingTask(mlp(), features(16), 16, adamw, CROSS), up.PowerSGD(rank=2, saving=1.0)
    shapes = [value.shape for value in task.model.parameters() if low.choice("", value.shape) != "exact"]
    for more, parts in (({"zero": 1}, 1), ({"zero": 3}, 1), ({"zero": 2, "shard": 2}, 2)):
        wanted = sum(4 * (-(-n // parts) * m + 2 * m) for n, m in shapes)
        for precision, times in (("f32", 1), ("fp16", 2)):
            plain, found = (
                DryRun(task, up.Plan(data=4, precision=precision, compression=each, **more)).peaks()[0]
                for each in (None, low)
            )
            kept = found.parts["buffers"] - plain.parts["buffers"]
            assert wanted <= kept <= (times + 0.6) * wanted, (more, precision)
    given: dict[str, Any] = {"data": 4, "ranks": 4, "recompute": False, "micro_batches": 1}
    for zero in (1, 2, 3):
        assert planned(**given, zero=zero, compression=low).plan.compression == low


def test_compression_keeps_its_errors_and_factors() -> None:
    task = TrainingTask(mlp(), features(16), 16, adamw, CROSS)
    whole, coded, half, ranked = (
        DryRun(task, up.Plan(data=2, compression=each)).peaks()[0].parts["buffers"]
        for each in (
            None, up.Compressed("int8", small=0), up.Compressed("int8", small=0, errors="1-6-9"),
            up.PowerSGD(rank=2),
        )
    )  # fmt: skip
    assert coded - half == 2 * task.parameters
    assert coded >= whole + 4 * 4 * task.parameters  # errors; a vector, its sum and what is left
    matrices = sum(v.numel() for v in task.model.parameters() if v.dim() == 2)
    assert ranked >= whole + 4 * matrices
    with pytest.raises(ValueError, match="compression takes f32 gradients in CPU memory"):
        up.plan(
            mlp().double(), sample=features(4), optimizer=adamw, loss=CROSS,
            price=up.Plan(data=2, compression=up.Compressed("bf16")),
        )  # fmt: skip


def test_stages_follow_the_speed_and_the_memory_of_hosts() -> None:
    given: dict[str, Any] = {"pipeline": 2, "data": 1, "tensor": 1, "schedule": "1f1b", "ranks": None}
    equal = planned(**given, hosts=[1, 1])
    hosts = [up.JobHost(ranks=1), up.JobHost(ranks=1, speed=0.25)]
    slow = planned(**given, hosts=hosts)
    assert slow.plan.cuts > equal.plan.cuts  # the second rank has fewer pieces
    assert slow.seconds > equal.seconds
    same = planned(price=equal.plan, ranks=None, hosts=hosts)
    assert same.seconds > slow.seconds
    least = planned(price=equal.plan).memory_bytes
    small = [up.JobHost(ranks=1), up.JobHost(ranks=1, memory=least // 2)]
    refused = planned(price=equal.plan, ranks=None, hosts=small)
    assert not refused.fits
    assert refused.limit_bytes == least // 2


def test_optimizers_without_moments_and_frozen_parameters_need_less() -> None:
    """What a plan needs at least is that of this optimizer and of what is trained."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    frozen = mlp()
    for value in [*frozen.parameters()][2:]:
        value.requires_grad_(False)
    for model, optimizer in ((mlp(), sgd), (frozen, adamw)):
        options: dict[str, Any] = {"sample": features(4), "optimizer": optimizer, "loss": CROSS}
        needed = up.plan(model, **options, price=up.Plan()).memory_bytes
        assert needed < 2.6 * sum(value.nbytes for value in model.parameters())
        given: dict[str, Any] = {"recompute": False, "micro_batches": 1}
        assert up.plan(model, **options, **given, ranks=1, memory=needed).fits


def test_the_moments_are_those_of_a_step() -> None:
    """A dry run makes them by kernels of lists, a run on a CPU by loops."""
    optim = torch.optim
    makers: list[Callable[[Any], Any]] = [
        lambda values: optim.SGD(values, lr=0.1, momentum=0.9),
        lambda values: optim.AdamW(values, amsgrad=True),
        *(optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.Rprop),
        lambda values: optim.RMSprop(values, momentum=0.9, centered=True),
    ]
    for make in makers:
        model, sample = mlp(), features(4)
        (peak,) = DryRun(TrainingTask(model, sample, 4, make, CROSS), up.Plan()).peaks()
        optimizer = make(model.parameters())
        CROSS(model(sample[0]), sample[1]).backward()
        optimizer.step()
        state = {
            id(t): t.nbytes for kept in optimizer.state.values() for t in kept.values() if torch.is_tensor(t)
        }
        assert peak.parts["moments"] == sum(state.values()), optimizer


def test_the_search_equals_an_exhaustive_one() -> None:
    compare_searches((0, 1, 2, RANKS_THAT_DIFFER))


@pytest.mark.sweep
@pytest.mark.timeout(6000)
def test_the_search_equals_an_exhaustive_one_on_many_spaces() -> None:
    compare_searches(range(1000))


RANKS_THAT_DIFFER = 8
"""A space whose fastest plan gives more stages to its faster ranks."""


SPEEDS = (1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 0.5, 1.0), (0.5, 0.5, 1.0, 1.0)


def compare_searches(seeds: Iterable[int]) -> None:
    """Search random small spaces, and price and run all their plans. What is recorded is of all spaces."""
    widths = (8, 64, 64, 16, 96, 32, 64, 16, 4)
    small = nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(widths)))
    sample = torch.randn(4, 8), torch.randint(4, (4,))
    tasks = {rows: TrainingTask(small, sample, rows, adamw, CROSS) for rows in (4, 8)}
    for seed in seeds:
        draw = random.Random(seed)
        ranks, rows = draw.choice((1, 2, 4)), draw.choice((4, 8))
        given = {
            "recompute": [False],
            "tensor": [1],
            "pipeline": draw.sample([1, 2, 4], 2),
            "schedule": draw.sample(["1f1b", "zb-h1", "zbv", "interleaved"], 2),
            "zero": draw.sample([0, 1, 2, 3], 2),
            "micro_batches": draw.sample([1, 2, 4], 2),
            "shard": [None],
        }
        speeds, memory = draw.choice(SPEEDS)[:ranks], round(2 ** draw.uniform(16, 21))
        machine = JobMachine((memory,) * ranks, (0,) * ranks, tuple(speeds), None)
        every = PlanSearch(tasks[rows], given, machine)
        try:
            choice = every.choose()
        except up.NoPlanFitsError:
            choice = None
        fitting = []
        for plan in plans(ranks, rows, given, host=ranks):
            for staged in every._staged(plan):
                time = every._time(staged)
                found = None if time is None else every._try(time, staged)
                if time is not None and found is not None and not found.peak.exceeded:
                    fitting.append(time.total)
        if choice is None:
            assert not fitting, (given, speeds, memory)
            continue
        best = sorted(fitting)[:6]
        shown = [choice.seconds, *(each.time.total for each in choice.next_best)]
        assert shown == pytest.approx(best), (given, speeds, memory)
        assert choice.complete
        assert all(each.problem or each.excess_bytes or each.excess_s >= 0 for each in choice.refused)


def test_candidates_are_plans_that_differ() -> None:
    found = list(plans(8, 16, {"zero": 1}, host=4))
    assert len(set(found)) == len(found) > 50
    assert all(each.ranks == 8 and each.zero == 1 and each.tensor <= 4 for each in found)
    assert all(16 % (each.data * each.micro_batches) == 0 for each in found)
    assert {each.shard for each in found if each.data == 8} == {None, 2, 4}
    for plan in (up.Plan(data=2, pipeline=2, cuts=(3,)), up.Plan(data=4, zero=2)):
        around = neighbours(plan, 4, 16, host=4)
        assert all(changes(other, plan) for other in around)
    assert up.Plan(data=4, zero=2, shard=2) in around
    assert up.Plan(data=4) in neighbours(up.Plan(data=4, zero=1, shard=2), 4, 16, host=4)


def test_what_is_asked_for_is_searched_too() -> None:
    found = set(plans(4, 16, {}, host=4, axes=("context", "expert", "disk")))
    for plan in (
        up.Plan(context=4, zero=3),
        up.Plan(context=2, data=2, expert=4),
        up.Plan(context=2, tensor=2, recompute=True),
        up.Plan(data=4, swap="disk"),
    ):
        assert plan in found
    assert all(each.ranks == 4 for each in found)
    around = neighbours(up.Plan(data=4), 4, 16, host=4, axes=("context", "expert", "disk"))
    assert {up.Plan(data=2, context=2), up.Plan(data=4, expert=2), up.Plan(data=4, swap="disk")} <= {*around}
    assert not any(each.context > 1 or each.expert > 1 or each.swap for each in plans(4, 16, {}, host=4))
    for given in ({"context": 2}, {"expert": 2}, {"swap": "memory"}):
        assert {str(getattr(each, *given)) for each in plans(4, 16, given, host=4)} == {str(*given.values())}


class Experts(nn.Module):
    """Eight experts that are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up, self.down = (nn.Parameter(torch.randn(8, *shape)) for shape in ((256, 512), (512, 256)))

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("rd,edh->erh", rows, self.up).relu()
        every = torch.einsum("erh,ehd->red", made, self.down)
        return (every.gather(1, index[..., None].expand(-1, -1, 256)) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """A router, experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(256, 8), Experts(), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, index, weights))


def test_experts_that_are_spread_send_rows_and_reduce_less() -> None:
    of = up.StepPredictor(Mixture(), features(16), loss=CROSS, optimizer=adamw)
    whole, spread = (of.forecast(up.Plan(data=2, expert=each)).seconds for each in (1, 2))
    assert spread["experts"] > 0 == whole.get("experts", 0)
    (sent,) = (each for each in of.collectives(up.Plan(data=2, expert=2)) if each.axis == "expert")
    assert sent[:3] == ("all_to_all", "expert", 2) and 0 < sent.seconds < spread["experts"]
    assert spread["data"] < 0.6 * whole["data"]
    assert spread["update"] < 0.6 * whole["update"]
    assert spread["forward"] > whole["forward"]  # rows are sorted


@pytest.mark.parametrize(
    ("experts", "top", "ranks"), [(4, 2, 2), (8, 2, 4), (16, 4, 2), (2, 2, 2), (4, 1, 4)]
)
def test_rows_of_experts_are_those_of_a_full_rank(experts: int, top: int, ranks: int) -> None:
    drawer, rows, trials = random.Random(0), 64, 200
    received, pairs = [], []
    for _ in range(trials):
        chosen = [drawer.sample(range(experts), top) for _ in range(rows * ranks)]
        here = [sum(each < experts // ranks for each in row) for row in chosen]
        received.append(sum(map(bool, here)))
        pairs.append(sum(here))
    drawn = DrawnRows.of(rows, experts, top, ranks)
    for full, seen in ((drawn.received, received), (drawn.pairs, pairs)):
        assert sum(each <= full for each in seen) >= 0.95 * trials
        assert full <= max(seen) + 2  # so it is no bound for every router
    assert drawn.sent == pytest.approx(statistics.mean(received), rel=0.02)


def predictor(hosts: tuple[int, ...] = (), model: nn.Module | None = None) -> up.StepPredictor:
    model = model or nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return up.StepPredictor(model, features(12), loss=CROSS, optimizer=adamw, hosts=hosts)


def test_the_group_that_spans_hosts_is_the_slowest() -> None:
    hosts = (0, 0, 0, 1, 1, 1)
    groups = RankGroups(hosts, CollectiveCosts(MachineCalibration(), hosts))
    assert groups.slowest(2, 1) == [2, 3]
    assert groups.slowest(3, 1) == [0, 1, 2]
    assert groups.slowest(3, 2) == [0, 2, 4]
    assert groups.farthest(0, 1, 1) == (0, 1)
    assert groups.farthest(0, 2, 2) == (1, 3)
    assert RankGroups().slowest(4, 2) == [0, 2, 4, 6]


def test_groups_that_do_not_divide_a_host_are_priced_between_hosts() -> None:
    plan = up.Plan(data=6, zero=3, shard=2)
    across, within = ((0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2))
    gathered = [
        next(each for each in predictor(hosts).collectives(plan) if each.collective == "all_gather")
        for hosts in (across, within)
    ]
    assert gathered[0].nbytes == gathered[1].nbytes
    assert gathered[0].seconds > gathered[1].seconds
    first, last = (0, 0, 1, 1), (1, 0, 0, 0)  # of a pipeline: where its first stage is, and its last one
    slow = [predictor(hosts).forecast(up.Plan(data=2, pipeline=2, cuts=(2,))) for hosts in (first, last)]
    assert slow[1].seconds["data"] > slow[0].seconds["data"]
    mirrored = predictor((0, 0, 0, 1)).forecast(up.Plan(data=2, pipeline=2, cuts=(2,)))
    assert mirrored.seconds["data"] == slow[1].seconds["data"]


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model[0].requires_grad_(False)
    every = sum(value.numel() for value in model.parameters())
    trained = sum(value.numel() for value in model[2].parameters())
    found = {each.collective: each for each in predictor(model=model).collectives(up.Plan(data=2, zero=3))}
    assert found["all_gather"].nbytes == 4 * every
    assert found["reduce_scatter"].nbytes == 4 * trained
    replicas = predictor(model=model).collectives(up.Plan(data=2))
    assert [each.nbytes for each in replicas if each.axis == "data"] == [4 * trained]
    for value in model.parameters():
        value.requires_grad_(True)
    whole = predictor(model=model).forecast(up.Plan(swap="memory")).seconds["swap"]
    model[0].requires_grad_(False)
    half = predictor(model=model).forecast(up.Plan(swap="memory")).seconds["swap"]
    assert 0.15 * whole < half < 0.3 * whole  # read for forward and backward: 2 of 10 passes


def test_ranks_of_a_host_share_its_memory() -> None:
    alone = JobMachine((120,), (0,), (1.0,), None, shared=True)
    assert alone.with_ranks(1, None).memory == (120,)
    assert alone.with_ranks(4, None).memory == (30,) * 4
    assert alone.with_ranks(4, 2).memory == (60,) * 4
    mixed = alone.with_ranks(4, [JobHost(ranks=3), JobHost(ranks=1, memory=7)])
    assert mixed.memory == (40, 40, 40, 7)
    assert alone.limited(50).with_ranks(4, None).memory == (50,) * 4
    two = JobMachine((60, 60, 80), (0, 0, 1), (1.0,) * 3, None, shared=True)
    assert two.with_ranks(8, 2).memory == (20,) * 8  # hosts are as the least here
    own = JobMachine((120,), (0,), (1.0,), None)
    assert own.with_ranks(4, None).memory == (120,) * 4  # each has a GPU


def test_more_ranks_on_this_host_have_less_memory_each() -> None:
    def limit(ranks: int) -> int:
        model = nn.Linear(256, 10)
        given = {"sample": features(8), "optimizer": adamw, "loss": CROSS, "trial": False}
        return up.plan(model, price=up.Plan(data=ranks), **given).limit_bytes

    assert limit(4) < limit(1) / 3


def test_a_control_group_allows_what_is_left_and_cached(tmp_path: Path) -> None:
    inner, own = tmp_path / "job" / "step", tmp_path / "cgroup"
    inner.mkdir(parents=True)
    own.write_text("0::/job/step\n")

    def write(folder: Path, most: str, used: int, cached: int) -> None:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    assert _of_control_groups(tmp_path, own) == []
    write(inner, "max", 50, 0)
    write(inner.parent, "100", 90, 30)
    assert _of_control_groups(tmp_path, own) == [40]
    write(inner, "60", 70, 0)
    assert sorted(_of_control_groups(tmp_path, own)) == [0, 40]
    assert _of_control_groups(tmp_path, tmp_path / "none") == []
