"""Models on the meta device: the values of one process, in less memory than the whole model takes."""

from pathlib import Path

import pytest

import suite

pytest.importorskip("torch")


def run(forks: suite.Forks, folder: Path, module: str, size: int, *arguments: str) -> list[str]:
    printed = forks.run(folder, {module: (f"parallel.{module}", size, list(arguments))})[module]
    if any("(ended with" in text for text in printed):
        pytest.fail("\n".join(printed), pytrace=False)
    return printed


def test_plans_begin_as_one_process(forks: suite.Forks, tmp_path: Path) -> None:
    run(forks, tmp_path, "in_turn", 2, "metas", "check_two_ranks_begin_as_one_process")


@pytest.mark.slow
@pytest.mark.sweep
def test_plans_of_four_begin_as_one_process(forks: suite.Forks, tmp_path: Path) -> None:
    run(forks, tmp_path, "in_turn", 4, "metas", "check_four_ranks_begin_as_one_process")


@pytest.mark.slow
@pytest.mark.sweep
def test_checkpoints(forks: suite.Forks, tmp_path: Path) -> None:
    run(forks, tmp_path, "in_turn", 2, "metas", "check_checkpoints_of_either_kind")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("axis", ["zero", "pipeline"])
def test_a_model_that_fits_on_no_rank(forks: suite.Forks, tmp_path: Path, axis: str) -> None:
    print("".join(run(forks, tmp_path, "fits", 4, axis)))
