"""PyTorch's own DDP and FSDP2 go on without a replica that dies, by `dist.shrink_group`: the examples."""

from pathlib import Path

import pytest

import suite

EXAMPLES = suite.HERE.parents[1] / "examples"


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        pytest.param("ddp_survives.py", (0, 2, 3), id="DDP", marks=pytest.mark.sweep),
        pytest.param("fsdp2_survives.py", (0, 1), id="FSDP2"),
    ],
)
def test_a_replica_dies(forks: suite.Forks, tmp_path: Path, program: str, shown: tuple[int, ...]) -> None:
    printed = forks.run_program(tmp_path, 4, EXAMPLES / program, dead=1)
    for number, rank in enumerate(shown):
        lines = printed[rank].splitlines()
        assert f"rank {number} of {len(shown)}" in lines
        assert any(line.startswith("loss") and "from one process's" in line for line in lines), lines
