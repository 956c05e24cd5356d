"""`unisono calibrate --compute` as a user calls it: five minutes on a quiet machine."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from inside_planner import recall_compute
from python_runs import ran
from unisono.engine.environment import env


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "unisono", "calibrate", *words)
    return ran(*words, XDG_CACHE_HOME=folder, UNISONO_CALIBRATION="")  # the tests' own is "none"


def test_hosts_and_compute_are_two_things(tmp_path: Path) -> None:
    done = run(tmp_path, "--compute", "--hosts")
    assert done.returncode == 2
    assert "--hosts or --compute, not both" in done.stderr


@pytest.mark.sweep
@pytest.mark.timeout(2800)
def test_the_machine_is_measured_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--compute")
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s of a rank" in done.stdout
    assert f"kept in {tmp_path}" in done.stdout
    found = recall_compute(env.Settings(cache_home=str(tmp_path)), str(torch.__version__))
    assert found.note == ""
    assert found.calibration.measured_here
    assert [each.ranks for each in found.calibration.settings][-1] == len(os.sched_getaffinity(0))
    again = run(tmp_path, "--compute", "--json")
    assert again.stderr == ""  # nothing was measured
    assert "tables" in again.stdout
