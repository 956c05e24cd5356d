"""`make model` says what it lacks. What the models show is checked by itself: it takes a minute."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S

CHECK = Path(__file__).resolve().parents[2] / "tools" / "check_models.py"


def check(*models: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = None if path is None else {"PATH": path}
    return subprocess.run(
        [sys.executable, str(CHECK), *models], capture_output=True, text=True, env=environ, timeout=HANG_S
    )


def test_without_spin_it_says_what_to_install(tmp_path: Path) -> None:
    done = check(path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "apt install spin" in done.stderr


@pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin")
def test_a_model_that_is_not_there_is_an_error() -> None:
    done = check("no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
