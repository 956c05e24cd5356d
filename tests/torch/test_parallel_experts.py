"""Layers of experts that are spread over ranks. Checks of parallel/expert_axis.py."""

from pathlib import Path

import pytest

import suite
from test_parallel_features import checks_of, run_checks

LONG = (
    "check_a_checkpoint_goes_on_under_another_plan",
    "check_a_large_model_is_copied_only_where_it_is_asked_for",
    "check_an_error_on_one_rank_ends_the_run_on_all",
    "check_frozen_parameters",
    "check_hugging_faces_models_train_as_in_one_process",
    "check_low_precision_is_that_of_data_parallelism",
    "check_own_models_train_as_in_one_process",
    "check_evaluation_prediction_and_a_report",
    "check_the_models_own_balance_loss_is_that_of_the_parts",
)


def test_experts(forks: suite.Forks, tmp_path: Path) -> None:
    short = [check for check in checks_of("expert_axis") if check not in LONG]
    run_checks(forks, tmp_path, "expert_axis", short, ranks=2)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check", LONG)
def test_models_with_experts(forks: suite.Forks, tmp_path: Path, check: str, ranks: int) -> None:
    run_checks(forks, tmp_path, "expert_axis", [check], ranks=ranks)
