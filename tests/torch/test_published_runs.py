"""A run under one plan publishes its weights; one under another takes them, fused layers included."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S
from ports import reserved

PROGRAM = Path(__file__).resolve().parent / "programs" / "publishes_a_run.py"


@pytest.mark.parametrize(("one", "other"), [("zero", "tensor"), ("pipeline", "zero")])
def test_weights_go_from_plan_to_plan(tmp_path: Path, one: str, other: str) -> None:
    options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = []
    with reserved() as port:
        for side, plan in (("publish", one), ("take", other)):
            size = "4" if plan == "pipeline" else "2"
            command = [sys.executable, "-m", "unisono", "run", "-n", size, str(PROGRAM), side, plan]
            environ = {**os.environ, "UNISONO_TOKEN": "ab" * 32}
            command += [f"127.0.0.1:{port}", str(tmp_path)]
            started.append(subprocess.Popen(command, env=environ, **options))
        texts = [each.communicate(timeout=HANG_S)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], texts
    assert "equal" in texts[0]
