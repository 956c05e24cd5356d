"""Training by a plan is recorded, and simulated on another network and on more replicas."""

from pathlib import Path

import pytest

import suite
from unisono import networks
from unisono.simulation import Call, Program, RecvFrom, SendTo, scaled, simulate_program
from unisono.simulation.recording import program_of, read_parts


def recorded(forks: suite.Forks, folder: Path, kind: str) -> Program:
    printed = forks.run(folder, {kind: ("programs.recorded_training", 4, [kind])})[kind]
    assert "(ended with" not in "".join(printed), printed
    return program_of(read_parts(str(folder / kind / "step.json")))


def test_tensor_and_data_parallel_training(forks: suite.Forks, tmp_path: Path) -> None:
    program = recorded(forks, tmp_path, "tensor")
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
def test_pipeline_parallel_training(forks: suite.Forks, tmp_path: Path) -> None:
    program = recorded(forks, tmp_path, "pipeline")
    sent = [item for items in program.ranks for item in items if isinstance(item, SendTo)]
    taken = [item for items in program.ranks for item in items if isinstance(item, RecvFrom)]
    assert len(sent) == len(taken) > 0
    assert simulate_program(program, networks.star(2, ranks=2)).seconds > 0
