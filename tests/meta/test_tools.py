"""Layers, budgets, README's commands, and words that do not belong into the project."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from launching import wait_until
from loops import each

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent
PROGRAMS = Path(__file__).parent / "programs"
PIP = str(PROGRAMS / "stands_in_for_pip.py")

# Each pattern is written so that it does not match itself.
FORBIDDEN = [
    r"(?<![\w.])[/]work[/]",
    r"[/]opt[/](pypi|wheels)",
    r"\b[Ii]ssues? [#]?\d",
    r"\b(this|previous|next|earlier) [s]ession\b",
    r"\b(TODO|FIXME|XXX)[:( ]",
    r"[g]ithub\.com/(?!pytorch|facebookincubator|NVIDIA|openucx|rigtorp|wjakob)",
]
BINARY = (".png", ".gif", ".jpg", ".pdf", ".ico", ".svg")


def run(*command: str) -> str:
    """Run a tool in the repository's root and return its output; a failure shows it."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stdout}", pytrace=False)
    return done.stdout


def tracked_files() -> list[Path]:
    """List what is in the repository, or will be when it is added."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_layers():
    lint_imports = SCRIPTS / "lint-imports"
    if not lint_imports.exists():
        pytest.skip("import-linter is not installed")
    run(str(lint_imports), "--no-cache", "--no-logo")
    run(sys.executable, "tools/check_imports.py")


def test_includes():
    run(sys.executable, "tools/check_includes.py")


def test_includes_that_are_refused(tmp_path: Path):
    texts = {
        "kernels/sum.hpp": "#include <vector>\n",
        "kernels/late.cpp": '#include "kernels/sum.hpp"\n#include "engine/run.hpp"\n',
        "engine/run.hpp": '#include "kernels/sum.hpp"\n',
        "engine/gone.cpp": '#include "engine/gone.hpp"\n',
        "other/a.cpp": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "tools/check_includes.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "engine/gone.cpp includes engine/gone.hpp",
        "kernels/late.cpp includes engine/run.hpp",
        "other/a.cpp is in no package",
    ]


def test_budgets():
    run(sys.executable, "tools/budgets.py")


def test_budgets_measure_functions():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import budgets
    finally:
        sys.path.pop(0)
    python = (
        "def short():\n    return 1\n\nclass A:\n    async def long(self):\n        a = 1\n        return a\n"
    )
    assert dict(budgets.python_functions(python)) == {"short": 2, "long": 3}
    cpp = """\
namespace unisono {
struct Ring {
  int size() const {
    return 2;
  }
};
void Engine::run(int a,
                 int b) {
  if (a) {
    b = 1;
  } else {
    b = 2;
  }
}
template <class T>
T twice(T x) {
  for (int i = 0; i < 2; i++) {
    x += x;
  }
  return x;
}
}  // namespace unisono
"""
    assert dict(budgets.cpp_functions(cpp)) == {"size": 3, "Engine::run": 8, "twice": 6}


def test_readme_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
        assert named, f"{page} names no make command"
        assert named <= targets, f"{page} names what the Makefile lacks"


@each("pattern", FORBIDDEN)
def test_no_forbidden_words(pattern):
    found = []
    for path in tracked_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return {name: importlib.import_module(name) for name in ("install_engine", "install_torch", "progress")}


@pytest.mark.parametrize("code", [0, 3])
def test_progress_of_the_build(
    code: int,
    tools: dict[str, ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    stage = tools["install_engine"].stage
    monkeypatch.setattr(tools["progress"], "QUIET_S", float("inf"))  # however long the child takes to start
    assert stage("  [3/40] Building CXX") == "compiling the engine, step 3 of 40"
    assert stage("  removing [3/40]") is None
    log = tmp_path / "log"
    program = [sys.executable, "-X", "utf8", PIP, "compiles", str(code)]
    assert tools["progress"].follow(program, log, stage) == code
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert re.match(r"    (asking pip|configuring the engine's build) \(\d+ s\)", shown[0])
    failed = "failed while compiling the engine, step 3 of 40 ("
    assert ("installed (" if code == 0 else failed) in shown[1]
    assert "Building CXX object" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [0, 1])
def test_the_download_of_pytorch_is_announced_and_followed(
    code: int,
    tools: dict[str, ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    torch = tools["install_torch"]
    monkeypatch.setattr(torch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch, "build_offered", lambda requirement, options: torch.CUDA)
    monkeypatch.setattr(torch, "PIP", [sys.executable, PIP, "downloads_pytorch", str(code)])
    monkeypatch.setattr(torch, "LOG", tmp_path / "log")
    monkeypatch.setattr(torch.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(tools["progress"], "QUIET_S", 0.0)
    assert torch.main(["torch==2.15.0"]) is None
    shown = capsys.readouterr().out
    assert "about 3 GB to download, 5 GB on disk" in shown.partition("downloading torch")[0]
    assert "TORCH=0" in shown.partition("downloading torch")[0]
    assert "downloading torch: 0.02 of about 3 GB (" in shown
    assert "installing 2 packages (" in shown
    assert ("PyTorch was not installed: pip failed with 1" in shown) == bool(code)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    if code:
        assert "error: PyTorch was not installed" in torch.main(["torch==2.15.0", "--required"])


def test_too_little_disk_is_told_before_the_download(
    tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
):
    torch = tools["install_torch"]
    monkeypatch.setattr(torch.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(2e9)))
    assert re.match(r"2\.0 GB are free for .*, and 8 needed", torch.install("torch", [], torch.CUDA))


@pytest.mark.parametrize(
    "cpu, chosen",
    [(False, ("torch==2.14.1", "CUDA build")), (True, ("torch==2.13.0", "CPU build"))],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one build")
def test_the_first_version_that_there_is(
    cpu: bool, chosen: tuple[str, str], tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
):
    torch = tools["install_torch"]
    listing = "torch (2.14.1)\nAvailable versions: 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.1"
    monkeypatch.setattr(torch, "PIP", [sys.executable, "-c", f"print({listing!r})"])
    offered = ["torch==2.15.0", "torch==2.14.1", "torch==2.13.0"]
    requirement, build = torch.choose(offered, [], cpu=cpu)
    assert (requirement, build.name) == chosen
    assert "pip finds no torch==2.15.0" in torch.choose(["torch==2.15.0"], [], cpu=cpu)[1]


@pytest.mark.parametrize(
    "listing, found",
    [
        ("torch (2.13.0)\nAvailable versions: 2.13.0, 2.12.1", "CUDA"),
        ("torch (2.13.0)\nAvailable versions: 2.13.0+cpu, 2.13.0", "CPU"),
        ("torch (2.9.0)\nAvailable versions: 2.9.0", "pip finds no torch==2.13.0 for Python 3"),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one build")
def test_which_build_pip_would_take(
    listing: str, found: str, tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
):
    torch = tools["install_torch"]
    monkeypatch.setattr(torch, "PIP", [sys.executable, "-c", f"print({listing!r})"])
    offered = torch.build_offered("torch==2.13.0", [])
    if isinstance(offered, str):
        assert found in offered
    else:
        assert offered is getattr(torch, found)


def installing(log: Path, case: str) -> list[str]:
    """The command that installs the engine with what stands in for pip."""
    program = str(PROGRAMS / "installs_the_engine.py")
    return [sys.executable, program, str(ROOT / "tools"), str(log), sys.executable, PIP, case]


def test_ctrl_c_ends_the_build_and_names_the_log(tmp_path: Path):
    log = tmp_path / "log"
    command = installing(log, "is_cancelled")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as tool:
        try:
            wait_until(lambda: log.exists() and "[3/40]" in log.read_text())  # seen while the build goes on
            os.killpg(tool.pid, signal.SIGINT)
            said, _ = tool.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tool.pid, signal.SIGKILL)
    assert tool.returncode == 130
    assert "interrupted while compiling the engine, step 3 of 40 (" in said
    assert said.endswith(f"interrupted; all pip said: {log}\n")
    assert "Traceback" not in said + log.read_text()
    assert "cancelled" in log.read_text()


def test_a_failed_build_shows_the_first_error_of_the_compiler_first(tmp_path: Path):
    log = tmp_path / "log"
    command = installing(log, "meets_compiler_errors")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    shown = done.stdout.partition("failed while ")[2].splitlines()[1:]
    assert shown[:2] == ["/csrc/a.cpp:7:3: error: 'x' was not declared in this scope", "ninja goes on"]
    assert str(log) in shown[-1]
