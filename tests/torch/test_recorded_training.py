"""Training by a plan is recorded, and simulated on another network and on more replicas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unisono import networks
from unisono.simulation import Call, RecvFrom, SendTo, read_program, scaled, simulate_program

PROGRAM = Path(__file__).with_name("programs") / "recorded_training.py"


def recorded(kind: str, tmp_path: Path) -> Path:
    file = tmp_path / "step.json"
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "-n", "4", "--record", str(file), str(PROGRAM), kind],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return file


@pytest.mark.timeout(200)
def test_tensor_and_data_parallel_training(tmp_path: Path) -> None:
    program = read_program(recorded("tensor", tmp_path))
    calls = {call.collective for items in program.ranks for call in items if isinstance(call, Call)}
    assert "all_reduce" in calls
    groups = {tuple(group) for group in program.groups}
    assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= groups  # tensor is the fastest axis
    here = simulate_program(program, networks.star(2, ranks=2))
    slower = simulate_program(program, networks.star(2, ranks=2, cable=networks.Cable(1e-3, 1e6)))
    assert slower.seconds > here.seconds
    more = simulate_program(scaled(program, 64, replica=2), networks.star(32, ranks=2))
    assert more.size == 64
    assert more.seconds > 0


@pytest.mark.sweep
@pytest.mark.timeout(200)
def test_pipeline_parallel_training(tmp_path: Path) -> None:
    program = read_program(recorded("pipeline", tmp_path))
    sent = [item for items in program.ranks for item in items if isinstance(item, SendTo)]
    taken = [item for items in program.ranks for item in items if isinstance(item, RecvFrom)]
    assert len(sent) == len(taken) > 0
    assert simulate_program(program, networks.star(2, ranks=2)).seconds > 0
