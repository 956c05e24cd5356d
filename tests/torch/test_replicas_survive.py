"""PyTorch's own DDP and FSDP2 go on without a replica that dies, by `dist.shrink_group`: the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

import suite
from launching import launching

EXAMPLES = suite.HERE.parents[1] / "examples"


@pytest.mark.parametrize(
    ("program", "ranks", "shown"),
    [
        pytest.param("ddp_survives.py", 4, {0, 2, 3}, id="DDP", marks=pytest.mark.sweep),
        pytest.param("fsdp2_survives.py", 4, {0, 1}, id="FSDP2"),
    ],
)
def test_a_replica_dies(tmp_path: Path, program: str, ranks: int, shown: set[int]) -> None:
    with launching(tmp_path) as launcher:
        found = launcher.run(EXAMPLES / program, "--elastic", f"1:{ranks}")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    for number, rank in enumerate(sorted(shown)):
        assert f"[rank {rank}] rank {number} of {len(shown)}" in lines
        assert any(line.startswith(f"[rank {rank}] loss") and "from one process's" in line for line in lines)
    assert "is out:" in found.stderr
