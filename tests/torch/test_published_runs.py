"""A run under one plan publishes its weights; one under another takes them, fused layers included."""

from pathlib import Path

import pytest

import suite
from ports import reserved


@pytest.mark.parametrize(("one", "other", "size"), [("zero", "tensor", 4), ("pipeline", "zero", 6)])
def test_weights_go_from_plan_to_plan(
    forks: suite.Forks, tmp_path: Path, one: str, other: str, size: int
) -> None:
    with reserved() as port:
        job = ("programs.publishes_a_run", size, [one, other, str(port)])
        printed = forks.run(tmp_path, {"runs": job})["runs"]
    assert not any("(ended with" in text for text in printed), printed
    assert "equal" in printed[0]
