"""Parallel training on virtual GPUs."""

from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).resolve().parents[1] / "torch" / "programs"


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_plans_have_the_losses_of_one_process_on_the_cpu(machine: Any) -> None:
    ended = machine.run(PROGRAMS / "plans.py", limit_s=110, arguments=["nccl"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("Plan(") == 10


@pytest.mark.parametrize("machine", [2], indirect=True)
@pytest.mark.parametrize("backend", ["nccl", "unisono"])
def test_optimizers_take_tensors_that_are_cut_beside_others(machine: Any, backend: str) -> None:
    ended = machine.run(PROGRAMS / "optimizers.py", limit_s=110, arguments=[backend])
    assert not any(ended.codes), ended.text
