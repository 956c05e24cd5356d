"""Layers, budgets, README's commands, and words that do not belong into the project."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launching import wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent

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


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_forbidden_words(pattern):
    found = []
    for path in tracked_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


COMPILING = """
import time
print("  *** Configuring CMake...", flush=True)
time.sleep(1.5)
print("  [3/40] Building CXX object é", flush=True)
raise SystemExit(CODE)
"""


@pytest.fixture
def install_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("install_engine")


@pytest.mark.parametrize("code", [0, 3])
def test_progress_of_the_build(
    code: int,
    install_engine: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(install_engine, "QUIET_S", float("inf"))  # however long the child takes to start
    assert install_engine.stage("  [3/40] Building CXX") == "compiling the engine, step 3 of 40"
    assert install_engine.stage("  removing [3/40]") is None
    log = tmp_path / "log"
    program = [sys.executable, "-X", "utf8", "-c", COMPILING.replace("CODE", str(code))]
    assert install_engine.follow(program, log) == code
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert re.match(r"    (asking pip|configuring the engine's build) \(\d+ s\)", shown[0])
    failed = "failed while compiling the engine, step 3 of 40 ("
    assert ("installed (" if code == 0 else failed) in shown[1]
    assert "Building CXX object" in log.read_text(encoding="utf-8")


INSTALLS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import install_engine
install_engine.PIP = [sys.executable, "-c", sys.argv[3]]
install_engine.LOG = Path(sys.argv[2])
sys.exit(install_engine.main([]))
"""
# Ends when it is told, and leaves one behind that does not, with the pipe in its hands.
TOLD_TO_END = """
import signal, subprocess, time
subprocess.Popen(["env", "--ignore-signal=INT", "sleep", "300"]).returncode = 0
try:
    print("[3/40] Building CXX object", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    print("cancelled", flush=True)
"""


def test_ctrl_c_ends_the_build_and_names_the_log(tmp_path: Path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", INSTALLS, str(ROOT / "tools"), str(log), TOLD_TO_END]
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
