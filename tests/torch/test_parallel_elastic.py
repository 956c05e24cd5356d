"""Elastic training: ranks die in a step, and come. The losses are those of a run begun with these ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import suite
import unisono.parallel as up
from elastic_jobs import check_truth, elastic_launching, run_job, steps
from launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with elastic_launching(tmp_path) as made:
        yield made


@pytest.mark.sweep
def test_three_ranks_die_in_forward_in_the_exchange_and_in_the_update(
    launcher: Launcher, forks: suite.Forks
) -> None:
    job = run_job(launcher, "4", "18", "3:forward:3", "0:exchange:6", "1:optimizer:11")
    assert [(one["before"], one["size"]) for one in job.changes()] == [(4, 3), (3, 2), (2, 1)], job.output
    assert "is out: ended by SIGKILL" in job.output
    assert len(job.losses()) == 18
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_ranks_die_between_steps_in_a_save_and_where_an_epoch_begins(
    launcher: Launcher, forks: suite.Forks
) -> None:
    job = run_job(launcher, "4", "18", "2:between:3", "0:save:6", "1:draw:9")
    assert [(one["before"], one["size"]) for one in job.changes()] == [(4, 3), (3, 2), (2, 1)], job.output
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_a_rank_that_raises_leaves_the_others(launcher: Launcher, forks: suite.Forks) -> None:
    job = run_job(launcher, "3", "10", "1:raise:4")
    assert "left because of ArithmeticError: a bad sample" in job.output
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2)], job.output
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_a_rank_that_is_behind_gets_the_step_from_those_that_completed_it(
    launcher: Launcher, forks: suite.Forks
) -> None:
    job = run_job(launcher, "3", "10", "0:behind:4", "1:behind:6", "2:forward:6", "0:exchange:9")
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2), (2, 1)], job.output
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_a_rank_that_stops_is_out(launcher: Launcher, forks: suite.Forks) -> None:
    job = run_job(launcher, "3", "10", "1:stop:4", flags=("--grace", "0.1"))
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2)], job.output
    job.check_samples()
    check_truth(forks, job)


def test_a_lost_rank_is_replaced_and_the_newcomer_has_the_state(
    launcher: Launcher, forks: suite.Forks
) -> None:
    job = run_job(launcher, "3", "0", "0:exchange:3", flags=("--respawn", "2"))
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2), (2, 3)], job.output
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_a_newcomer_comes_in_the_first_steps(launcher: Launcher, forks: suite.Forks) -> None:
    launcher.environ["PAUSE_S"] = "15"
    job = run_job(launcher, "3", "0", "0:exchange:1", flags=("--respawn", "2"))
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2), (2, 3)], job.output
    assert job.changes()[1]["steps"] < 2, job.output
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.sweep
def test_a_newcomer_that_dies_while_it_takes_the_state_leaves_the_others(
    launcher: Launcher, forks: suite.Forks
) -> None:
    job = run_job(launcher, "2", "0", "1:exchange:3", "new:take:0", flags=("--respawn", "3"))
    sizes = [one["size"] for one in job.changes()]
    assert sizes[0] == 1
    assert sizes[-1] == 2
    job.check_samples()
    check_truth(forks, job)


@pytest.mark.parametrize(
    ("plan", "faults", "sizes"),
    [
        pytest.param({"zero": 1}, ("3:forward:3", "0:exchange:6"), [(4, 3), (3, 2)], marks=pytest.mark.sweep),
        pytest.param(
            {"zero": 2},
            ("0:optimizer:3", "1:copied:5", "2:save:6"),
            [(4, 3), (3, 2)],
            marks=pytest.mark.sweep,
        ),
        ({"zero": 3}, ("1:exchange:3", "3:draw:9"), [(4, 3), (3, 2)]),
        pytest.param(
            {"zero": 3, "shard": 2},
            ("0:forward:3", "1:optimizer:6"),
            [(4, 3), (3, 2)],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=str,
)
def test_shards_of_a_dead_rank_come_from_copies(
    launcher: Launcher, forks: suite.Forks, plan: dict[str, Any], faults: tuple[str, ...], sizes: list[Any]
) -> None:
    launcher.environ["PLAN"] = json.dumps(plan)
    job = run_job(launcher, "4", "14", *faults)
    assert [(one["before"], one["size"]) for one in job.changes()] == sizes, job.output
    first = "from the replica on rank" if "shard" in plan else "from the copy on rank"
    assert first in job.changes()[0]["change"]
    job.check_samples(undone=True)
    check_truth(forks, job, **plan, data=4)


@pytest.mark.sweep
def test_a_newcomer_gets_shards(launcher: Launcher, forks: suite.Forks) -> None:
    launcher.environ["PLAN"] = json.dumps({"zero": 3})
    job = run_job(launcher, "3", "0", "0:exchange:3", flags=("--respawn", "2"))
    assert [(one["before"], one["size"]) for one in job.changes()] == [(3, 2), (2, 3)], job.output
    job.check_samples()
    check_truth(forks, job, zero=3)


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": 2},
        {"pipeline": 2},
        {"precision": "bf16"},
        {"swap": "memory"},
        {"compression": up.PowerSGD(rank=4)},
        {"data": 2, "local_steps": 3},
        {"copy_every": 2},
    ],
    ids=str,
)
def test_plans_that_cannot_be_elastic_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Plan: .*needs .*[:.] \w+"):
        up.Plan(elastic=True, **other)
    with pytest.raises(TypeError, match="elastic is 1, expected bool"):
        up.Plan(elastic=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copy_every is 0; it must be at least 1"):
        up.Plan(elastic=True, zero=1, copy_every=0)
    with pytest.raises(ValueError, match="copy_every=2 is for shards that survive"):
        up.Plan(zero=1, copy_every=2)


@pytest.mark.parametrize("name", ["check_a_process_group_of_the_program", "check_calls"])
def test_calls_that_are_refused(forks: suite.Forks, tmp_path: Path, name: str) -> None:
    printed = forks.run(tmp_path, {"refusals": ("parallel.elastic_refusals", 1, [name])})["refusals"]
    assert printed == ["rank 0:\n"], "".join(printed)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        pytest.param({"zero": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 2, "copy_every": 2}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_a_rank_that_was_behind_does_as_if_it_had_completed_the_step(
    launcher: Launcher, plan: dict[str, Any]
) -> None:
    launcher.environ["PLAN"] = json.dumps(plan)
    assert steps(launcher, "behind", 2)[0] == steps(launcher, "behind", 2, "calm")[0]


@pytest.mark.sweep
def test_a_rank_that_was_behind_in_a_draw_has_the_batches_of_the_others(launcher: Launcher) -> None:
    told, output = steps(launcher, "draw", 3)
    orders = [one["order"] for one in told]
    assert [*map(len, orders[4])] == [6, 4, 4, 4, 4, 2], output
    assert all(sorted(row for batch in order for row in batch) == [*range(24)] for order in orders)
    assert len(told) == 4 + 6 + 6


def test_on_change_cannot_make_calls(launcher: Launcher) -> None:
    told, output = steps(launcher, "nested", 2)
    assert "refused: a call of this run is under way" in output
    assert len(told) == 4


@pytest.mark.sweep
def test_a_newcomer_comes_where_loops_end_early(launcher: Launcher) -> None:
    told, output = steps(launcher, "many", 2, flags=("--respawn", "2"))
    assert len(told) > 8, output


@pytest.mark.parametrize(
    "name", ["check_a_batch_of_another_size_in_a_checkpoint", "check_a_loop_that_ends_early"]
)
def test_the_place_in_the_data(forks: suite.Forks, tmp_path: Path, name: str) -> None:
    printed = forks.run(tmp_path, {"places": ("parallel.elastic_places", 1, [name])})["places"]
    assert printed == ["rank 0:\n"], "".join(printed)


@pytest.mark.sweep
def test_the_example_goes_on_without_a_rank_and_with_a_new_one(launcher: Launcher) -> None:
    launcher.environ["STEP_S"] = "0.15"
    example = suite.HERE.parents[1] / "examples" / "elastic_training.py"
    found = launcher.run(example, "--elastic", "1:4", "--respawn", "3")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 30: 4 -> 3 ranks: rank 1 ended by SIGKILL" in found.stdout
    assert "3 -> 4 ranks: 1 joined" in found.stdout
