"""Elastic training under ZeRO goes back: to copies of some steps before, and to its newest checkpoint."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import suite
from elastic_jobs import JOB, check_truth, elastic_launching, run_forks, run_job, steps_of_forks
from launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with elastic_launching(tmp_path) as made:
        yield made


def test_the_run_goes_back_to_copies_and_to_its_checkpoint(forks: suite.Forks, tmp_path: Path) -> None:
    """One rank dies between two copies, then neighbours."""
    faults = ("1:exchange:7", "2:forward:12", "3:forward:12")
    plan = {"zero": 2, "copy_every": 4}
    job = run_forks(forks, tmp_path, "4", "14", *faults, left=1, plan=plan, SAVE_EVERY="2")
    changes = job.changes()
    assert [(one["before"], one["size"]) for one in changes] == [(4, 3), (3, 1)], job.output
    assert [(one["state"], one["steps"]) for one in changes] == [(4, 6), (10, 11)]
    assert re.search(r"; shard 1 from the copy on rank \d; steps 5 to 6 again$", changes[0]["change"])
    saved = job.folder / "saved" / "step-00000010"
    assert changes[1]["change"].endswith(f"; the state after step 10 from {saved}; step 11 again")
    job.check_samples(undone=True)
    check_truth(forks, job, zero=2, data=4)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("every", "faults", "redone"),
    [
        (3, ("1:exchange:6", "3:draw:9"), [2, 2]),
        (3, ("3:forward:5", "0:optimizer:9"), [1, 2]),
        (4, ("2:save:7", "1:behind:8", "0:forward:9"), [2, 0]),
    ],
    ids=str,
)
def test_with_a_copy_every_few_steps_the_run_makes_those_after_it_again(
    forks: suite.Forks, tmp_path: Path, every: int, faults: tuple[str, ...], redone: list[int]
) -> None:
    plan = {"zero": 2, "copy_every": every}
    job = run_forks(forks, tmp_path, "4", "14", *faults, left=2, plan=plan)
    changes = job.changes()
    assert [(one["before"], one["size"]) for one in changes] == [(4, 3), (3, 2)], job.output
    assert [one["steps"] - one["state"] for one in changes] == redone
    assert changes[0]["change"].endswith("again")
    job.check_samples(undone=True)
    check_truth(forks, job, zero=2, data=4)


@pytest.mark.sweep
def test_a_newcomer_gets_the_present_state_between_two_copies(launcher: Launcher, forks: suite.Forks) -> None:
    launcher.environ["PLAN"] = json.dumps({"zero": 3, "copy_every": 50})
    job = run_job(launcher, "3", "0", "0:exchange:3", flags=("--respawn", "2"))
    lost, joined = job.changes()
    assert (lost["before"], lost["size"], lost["state"]) == (3, 2, 0), job.output
    assert (joined["before"], joined["size"], joined["state"]) == (2, 3, joined["steps"]), job.output
    job.check_samples(undone=True)
    check_truth(forks, job, zero=3)


NEIGHBOURS = ("1:forward:6", "2:forward:6")


@pytest.mark.sweep
@pytest.mark.parametrize("plan", [{"zero": 3}, {"zero": 1, "copy_every": 2}], ids=str)
def test_shards_that_died_with_their_copies_come_from_the_newest_checkpoint(
    forks: suite.Forks, tmp_path: Path, plan: dict[str, Any]
) -> None:
    job = run_forks(forks, tmp_path, "4", "14", *NEIGHBOURS, left=2, plan=plan, SAVE_EVERY="3")
    (change,) = job.changes()
    assert (change["before"], change["size"], change["steps"], change["state"]) == (4, 2, 5, 3)
    saved = job.folder / "saved" / "step-00000003"
    assert f"; the state after step 3 from {saved}; steps 4 to 5 again" in change["change"], job.output
    job.check_samples(undone=True)
    check_truth(forks, job, zero=plan["zero"], data=4)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("every", "why"),
    [(100, "this run has saved and loaded no checkpoint"), (1, "the newest checkpoint cannot be loaded")],
)
def test_shards_that_died_with_their_copies_end_a_run_without_checkpoint(
    launcher: Launcher, every: int, why: str
) -> None:
    launcher.environ |= {"PLAN": json.dumps({"zero": 3}), "SAVE_EVERY": str(every)}
    folder = launcher.folder / "job"
    folder.mkdir()
    more = ("0:lose:6", *NEIGHBOURS)
    found = launcher.run(JOB, "--elastic", "1:4", args=(str(folder), "4", "10", *more))
    assert found.returncode != 0
    assert "a shard of the state was lost with all its copies" in found.stderr
    assert why in found.stderr


@pytest.mark.sweep
def test_steps_are_made_again_as_they_were_begun(forks: suite.Forks, tmp_path: Path) -> None:
    plan = {"zero": 2, "copy_every": 3}
    told, output = steps_of_forks(forks, tmp_path / "lost", "evaluating", **plan)
    assert told == steps_of_forks(forks, tmp_path / "calm", "evaluating", "calm", **plan)[0], output
    assert len(told) == 12
