"""Parallel training on virtual GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "torch" / "programs" / "plans.py"


def test_plans_have_the_losses_of_one_process_on_the_cpu() -> None:
    command = [sys.executable, "-m", "unisono", "run", "--virtual-gpus", "4", str(PROGRAM), "nccl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Plan(") == 7
