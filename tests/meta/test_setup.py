"""What `make` does on a new machine, and what a release is made of."""

import importlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import unisono
from effort import HANG_S
from loops import each
from python_runs import ran

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


# ---- `make model` says what it lacks. What the models show is checked by itself: it takes a minute ----


CHECK = Path(__file__).resolve().parents[2] / "tools" / "check_models.py"


def check(*models: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {} if path is None else {"PATH": path}
    return ran(CHECK, *models, **environ)


def test_without_spin_it_says_what_to_install(tmp_path: Path) -> None:
    done = check(path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "apt install spin" in done.stderr


@pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin")
def test_a_model_that_is_not_there_is_an_error() -> None:
    done = check("no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr


# ---- what a release is made of: the checks of wheels, the workflows, the version ----


GOOD = "unisono-0.1.0-cp312-cp312-manylinux_2_27_x86_64.whl"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("wheels")


def packed(path: Path, *names: str, nbytes: int = 0) -> Path:
    """A wheel with these files; `nbytes` in the last."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, bytes(nbytes) if name == names[-1] else "")
    return path


def test_a_wheel_is_checked(wheels: ModuleType, tmp_path: Path) -> None:
    needed = sorted(wheels.needed())
    native = "unisono/_native.cpython-312-x86_64-linux-gnu.so"

    def faults(name: str, *names: str, nbytes: int = 0) -> list[str]:
        return list(wheels.check(packed(tmp_path / name, *names, nbytes=nbytes)))

    assert faults(GOOD, *needed, native, "unisono-0.1.0.dist-info/RECORD") == []
    assert faults(GOOD, *needed[1:], native) == [f"{GOOD}: lacks {needed[0]}"]
    assert faults(GOOD, *needed, "tests/a.py") == [f"{GOOD}: tests/a.py does not belong into it"]
    assert "at most" in faults(GOOD, *needed, native, nbytes=wheels.MOST_BYTES)[0]
    plain = "unisono-0.1.0-cp312-cp312-linux_x86_64.whl"
    assert faults(plain, *needed, native) == [f"{plain}: no manylinux tag"]


def test_the_ten_lines_are_those_of_readme(wheels: ModuleType) -> None:
    lines = importlib.import_module("try_wheels").ten_lines()
    assert "all_reduce" in lines
    compile(lines, "sum.py", "exec")


def test_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) | {".venv/.installed"}
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert workflows
    for path in workflows:
        called = set(re.findall(r"run: make (\S+)", path.read_text()))
        assert called <= targets | {"docs"}, path.name


def test_the_changelog_knows_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == unisono.__version__.removesuffix(".dev0")
