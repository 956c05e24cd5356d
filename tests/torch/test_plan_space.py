"""What `up.plan` searches: lists of values, compression, hosts that differ; against an exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import DryRun, JobMachine, PlanSearch, TrainingTask, plans
from planned_models import adamw, features, mlp, planned

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
