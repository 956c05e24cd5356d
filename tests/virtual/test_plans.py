"""Parallel training on virtual GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "torch" / "programs" / "plans.py"


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_plans_have_the_losses_of_one_process_on_the_cpu(machine: Any) -> None:
    ended = machine.run(PROGRAM, limit_s=110, arguments=["nccl"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("Plan(") == 7
