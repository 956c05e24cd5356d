"""What `make` does on a new machine: which Python it takes, what it says of PyTorch."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from effort import HANG_S
from loops import each

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """What make would run. The variables of a make that runs the tests do not count."""
    env = {"PATH": f"{path}:/usr/bin:/bin"}
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@each(
    "command, options",
    [
        (["test"], ""),
        (["test", "TORCH=0"], None),
        (["test", "TORCH=1"], "--required"),
        (["test", "TORCH=cpu"], "--cpu --required --index-url https://download.pytorch.org/whl/cpu"),
        (["test", "TORCH_PIP=--find-links here"], "--find-links here"),
        (["demo"], None),
        (["demo", "TORCH=1"], "--required"),
    ],
)
def test_when_pytorch_is_installed(command: list[str], options: str | None):
    ran = make(*command).stdout
    found = re.search(r"tools/install_torch.py (?:torch==\S+ +)+(.*)\n", ran)
    assert (" ".join(found[1].split()) if found else None) == options
    assert found is None or ran.index("engine-install.log" if "engine-install" in ran else "") < found.start()


def test_a_wrong_word_for_torch_is_an_error():
    assert "TORCH is 'yes', expected 0, 1, cpu or nothing" in make("test", "TORCH=yes").stderr


@pytest.mark.parametrize(
    "new_enough, taken",
    [(["python3"], "python3"), (["python3.12", "python3.10"], "python3.12"), ([], "python3")],
)
def test_the_first_python_that_is_new_enough(tmp_path: Path, new_enough: list[str], taken: str):
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexit {0 if name in new_enough else 1}\n")
        program.chmod(0o755)
    ran = make("VENV=.venv-none", ".venv-none/.created", path=str(tmp_path)).stdout
    assert ran.startswith(f"{taken} tools/preflight.py\n")
