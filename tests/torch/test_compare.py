"""`unisono compare` names each known fault of a small training, and none where there is none."""

import math
import subprocess
from pathlib import Path

import pytest

import suite
from effort import cases
from python_runs import ran
from unisono.compare.causes import finding
from unisono.compare.records import Reading, TrialRun, read_run

PROGRAM = Path(__file__).parent / "programs" / "faulty_training.py"
AGREE, PART, FAILED = 0, 1, 2

NAMED = {
    "none": "equal in 8 steps",
    "accumulation": "equal in 8 steps",
    "sum": "gradients are 2 times as large: they are summed over ranks",
    "no sampler": "every rank trains on the same rows",
    "seed": "ranks 0 and 1 begin with other parameters",
    "seed of size": "its seed depends on the number of ranks",
    "batch norm": "SyncBatchNorm",
    "dropout": "dropout drops the same places on all ranks",
    "no average": "gradients are not averaged over ranks",
    "one gradient": "the gradient of 2.bias is not averaged over ranks",
    "average twice": "gradients are divided by 2 once too often",
    "local clip": "it ran before the gradients were averaged",
    "each backward": "it is reduced more than once",
    "bf16": "as if they were rounded to 16 bits",
    "divided twice": "divided twice",
    "batch of all": "a step has 24 rows on 2 ranks and 12 on 1",
    "uneven": "a mean over ranks weighs each rank the same",
    "rate": "the learning rate is 0.1 and 0.2",
    "schedule": "its schedule counts the steps of one rank",
    "no set_epoch": "call sampler.set_epoch(epoch)",
    "token weights": "A loss over tokens or weights has to be divided by their number on all ranks",
    "loss over size": "the loss is divided by 2 once too often",
    "one rank writes": "one rank writes it",
}

USUAL = ("none", "batch norm")


def compared(*words: str) -> subprocess.CompletedProcess[str]:
    return ran("-m", "unisono", "compare", *words)


def recorded(forks: suite.Forks, folder: Path, size: int, program: Path, *words: str) -> TrialRun:
    """What the ranks of a run have written, each of which is a fork."""
    to = folder / str(size)
    to.mkdir()
    forks.run_program(to, size, program, *words, UNISONO_COMPARE=f"20:{to}")
    return read_run(f"{size} ranks", to, size)


@pytest.mark.parametrize("fault", cases(USUAL, [fault for fault in NAMED if fault not in USUAL]))
def test_a_fault_is_named(forks: suite.Forks, tmp_path: Path, fault: str) -> None:
    one, many = (recorded(forks, tmp_path, size, PROGRAM, fault, str(12 // size)) for size in (1, 2))
    at, why = finding(one, many) or (None, f"equal in {one.steps} steps")
    assert NAMED[fault] in " ".join(why.split()), at


@pytest.mark.parametrize("kind", cases(["bf16"], ["two optimizers", "lbfgs", "attention"]))
def test_a_right_training_has_no_fault(forks: suite.Forks, tmp_path: Path, kind: str) -> None:
    program = PROGRAM.with_name("right_training.py")
    assert finding(*(recorded(forks, tmp_path, size, program, kind) for size in (1, 2))) is None


def test_the_command_runs_a_script_on_each_number_of_ranks_and_says_where_they_part() -> None:
    done = compared("-n", "1,2", str(PROGRAM), "sum", "{12/ranks}")
    assert "2 ranks against 1 rank: they part at step" in done.stdout, done.stdout + done.stderr
    assert NAMED["sum"] in " ".join(done.stdout.split()), done.stdout
    assert done.returncode == PART


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    fails = tmp_path / "fails.py"
    fails.write_text("raise SystemExit(3)")
    for words, said in (
        (("-n", "2", str(PROGRAM)), "there is nothing to compare it with"),
        (("-n", "2,1", str(PROGRAM)), "the smallest first"),
        (("-n", "1,5", str(PROGRAM), "none", "{12/ranks}"), "12 is not divisible by 5 ranks"),
        (("-n", "1,2", str(fails)), "1 rank failed with exit code"),
        (("-n", "1", "--against", "gloo", str(PROGRAM), "none", "{12/ranks}"), "the backend 'unisono'"),
        (("-n", "1,2", "-c"), "the following arguments are required"),
    ):
        done = compared(*words)
        assert done.returncode == FAILED, done.stdout
        assert said in done.stderr, done.stderr


def test_two_libraries_agree() -> None:
    done = compared("-n", "2", "--against", "gloo", str(PROGRAM), "none", "{12/ranks}", "gloo")
    assert "2 ranks over Gloo against 2 ranks: equal to rounding" in done.stdout, done.stdout + done.stderr
    assert done.returncode == AGREE


def a_run(name: str, *ranks: list[float], kind: str = "loss") -> TrialRun:
    """A run with one number of each step and rank, and a parameter."""
    return TrialRun(
        name,
        [
            {
                key: [Reading(step, key[1], "", value, "float32")]
                for step, number in enumerate(numbers)
                for key, value in (
                    ((step, kind), number), ((step, "parameter"), [1.0, 1.0, 5]), ((step, "seed"), 0),
                )
            }
            for numbers in ranks
        ],
    )  # fmt: skip


def test_what_is_no_number_differs_from_one() -> None:
    """No comparison with nan is true, so a run of nan was equal to rounding."""
    one = a_run("1 rank", [1.0, 2.0])
    for wrong in (math.nan, math.inf, -math.inf):
        at, why = finding(one, a_run("2 ranks", [1.0, wrong], [1.0, 2.0])) or (None, "")
        assert at is not None and (at.step, at.kind) == (1, "loss")
        assert why == "on 2 ranks it is no finite number"
    at, why = finding(one, a_run("2 ranks", [1.0, 2.0], [1.0, math.nan], kind="clip")) or (None, "")
    assert at is not None and why == "on rank 1 it is no finite number"
    both = [a_run(name, [math.nan, math.inf]) for name in ("1 rank", "2 ranks")]
    assert finding(*both) is None


def test_a_number_after_an_infinite_one_still_counts() -> None:
    """Such as the first norm of scaled gradients in 16 bits."""
    one, many = (a_run("", [math.inf, number], kind="clip") for number in (1.0, 2.0))
    at, _ = finding(one, many) or (None, "")
    assert at is not None and at.step == 1
