"""What a release is made of: the checks of wheels, the workflows, the version."""

import importlib
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import unisono

ROOT = Path(__file__).resolve().parents[2]
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
