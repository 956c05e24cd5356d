"""Jobs on several hosts: the slowest group of ranks counts, and ranks of a host share its memory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import unisono.parallel as up
from inside_parallel import CollectiveCosts, JobHost, JobMachine, RankGroups, _of_control_groups
from planned_models import adamw, features
from unisono.engine.costs.machine import MachineCalibration

CROSS = nn.functional.cross_entropy


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
