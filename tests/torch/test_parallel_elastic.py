"""Elastic training: ranks die in a step, and come. The losses are those of a run begun with these ranks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import suite
import unisono.parallel as up
from elastic_jobs import check_truth, elastic_launching, run_forks, run_job, steps, steps_of_forks
from launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with elastic_launching(tmp_path) as made:
        yield made


class Case(NamedTuple):
    """A job whose ranks change.

    Args:
        args: ranks, steps (0: until it has changed), faults.
        sizes: before and after each change.
        plan: of the job. truth: what a run from there has of it.
        says: what the job prints.
        first: what it says of the first change; no launcher has a part in it.
        undone: see `Job.check_samples`.
    """

    args: tuple[str, ...]
    sizes: list[tuple[int, int]]
    plan: Mapping[str, Any] = {}
    truth: Mapping[str, Any] = {}
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    says: str = ""
    first: str = ""
    undone: bool = False


def sharded(faults: tuple[str, ...], first: str = "from the copy on rank", **plan: Any) -> Case:
    """Shards of a dead rank come from copies."""
    return Case(("4", "14", *faults), [(4, 3), (3, 2)], plan, plan | {"data": 4}, first=first, undone=True)


RESPAWN = ("--respawn", "2")
USUAL = {
    "a lost rank is replaced and the newcomer has the state": Case(
        ("2", "0", "0:exchange:3"), [(2, 1), (1, 2)], flags=RESPAWN
    ),
    "shards of zero=3": sharded(("1:exchange:3", "3:draw:9"), zero=3),
}
SWEPT = {
    "three ranks die in forward, in the exchange and in the update": Case(
        ("4", "18", "3:forward:3", "0:exchange:6", "1:optimizer:11"), [(4, 3), (3, 2), (2, 1)],
        says="is out: ended by SIGKILL",
    ),
    "ranks die between steps, in a save and where an epoch begins": Case(
        ("4", "18", "2:between:3", "0:save:6", "1:draw:9"), [(4, 3), (3, 2), (2, 1)]
    ),
    "a rank that raises leaves the others": Case(
        ("3", "10", "1:raise:4"), [(3, 2)], says="left because of ArithmeticError: a bad sample"
    ),
    "a rank that is behind gets the step from those that completed it": Case(
        ("3", "10", "0:behind:4", "1:behind:6", "2:forward:6", "0:exchange:9"), [(3, 2), (2, 1)]
    ),
    "a rank that stops is out": Case(("3", "10", "1:stop:4"), [(3, 2)], flags=("--grace", "0.1")),
    "a newcomer comes in the first steps": Case(
        ("3", "0", "0:exchange:1"), [(3, 2), (2, 3)], flags=RESPAWN, environ={"PAUSE_S": "15"}
    ),
    "a newcomer gets shards": Case(
        ("3", "0", "0:exchange:3"), [(3, 2), (2, 3)], {"zero": 3}, {"zero": 3}, RESPAWN
    ),
    "shards of zero=1": sharded(("3:forward:3", "0:exchange:6"), zero=1),
    "shards of zero=2": sharded(("0:optimizer:3", "1:copied:5", "2:save:6"), zero=2),
    "shards with replicas": sharded(
        ("0:forward:3", "1:optimizer:6"), "from the replica on rank", zero=3, shard=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)])
def test_a_job_goes_on_as_one_begun_with_its_ranks(launcher: Launcher, forks: suite.Forks, name: str) -> None:
    case = (USUAL | SWEPT)[name]
    launcher.environ |= {**case.environ} | ({"PLAN": json.dumps({**case.plan})} if case.plan else {})
    if case.first:
        job = run_forks(forks, launcher.folder, *case.args, left=case.sizes[-1][1], plan=case.plan)
    else:
        job = run_job(launcher, *case.args, flags=case.flags)
    changes = job.changes()
    assert [(one["before"], one["size"]) for one in changes] == case.sizes, job.output
    assert case.says in job.output
    assert case.first in changes[0]["change"]
    assert case.args[1] in ("0", str(len(job.losses())))
    assert name != "a newcomer comes in the first steps" or changes[1]["steps"] < 2, job.output
    job.check_samples(undone=case.undone)
    check_truth(forks, job, **case.truth)


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


@pytest.mark.parametrize(
    "name",
    [
        "check_a_process_group_of_the_program", "check_calls", "check_a_loop_that_ends_early",
        "check_a_batch_of_another_size_in_a_checkpoint",
    ],
)  # fmt: skip
def test_calls(forks: suite.Forks, tmp_path: Path, name: str) -> None:
    printed = forks.run(tmp_path, {"calls": ("parallel.elastic_calls", 1, [name])})["calls"]
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
    forks: suite.Forks, tmp_path: Path, plan: dict[str, Any]
) -> None:
    told, output = steps_of_forks(forks, tmp_path / "behind", "behind", **plan)
    assert told == steps_of_forks(forks, tmp_path / "calm", "behind", "calm", **plan)[0], output


@pytest.mark.sweep
def test_a_rank_that_was_behind_in_a_draw_has_the_batches_of_the_others(launcher: Launcher) -> None:
    told, output = steps(launcher, "draw", 3)
    orders = [one["order"] for one in told]
    assert [*map(len, orders[4])] == [6, 4, 4, 4, 4, 2], output
    assert all(sorted(row for batch in order for row in batch) == [*range(24)] for order in orders)
    assert len(told) == 4 + 6 + 6


def test_on_change_cannot_make_calls(forks: suite.Forks, tmp_path: Path) -> None:
    told, output = steps_of_forks(forks, tmp_path / "nested", "nested", dead=1)
    assert "refused: a call of this run is under way" in output
    assert len(told) == 4


@pytest.mark.sweep
def test_a_newcomer_comes_where_loops_end_early(launcher: Launcher) -> None:
    told, output = steps(launcher, "many", 2, flags=("--respawn", "2"))
    assert len(told) > 8, output


@pytest.mark.sweep
def test_the_example_goes_on_without_a_rank_and_with_a_new_one(launcher: Launcher) -> None:
    launcher.environ["STEP_S"] = "0.15"
    example = suite.HERE.parents[1] / "examples" / "elastic_training.py"
    found = launcher.run(example, "--elastic", "1:4", "--respawn", "3")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 30: 4 -> 3 ranks: rank 1 ended by SIGKILL" in found.stdout
    assert "3 -> 4 ranks: 1 joined" in found.stdout
