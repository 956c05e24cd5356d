"""Layers, budgets, README's commands, and words that do not belong into the project."""

import ast
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import unisono
from loops import each
from python_runs import ran
from unisono import _native

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
    run(sys.executable, "tools/check_imports.py")


def test_includes():
    run(sys.executable, "tools/check_includes.py")


def test_the_target_of_the_frames_fuzzer_compiles():
    """`make fuzz` needs clang; a renamed member shows here."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: a wheel is tested")
    run("g++", "-std=c++20", "-fsyntax-only", "-Icsrc", "tests/fuzz/frames_fuzz.cpp")


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
    done = ran("tools/check_includes.py", tmp_path, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "engine/gone.cpp includes engine/gone.hpp",
        "kernels/late.cpp includes engine/run.hpp",
        "other/a.cpp is in no package",
    ]


@each(
    ("line", "narrows"),
    [
        ("assert x is not None", True),
        ("assert self.x[0].y is not None", True),
        ("assert isinstance(x, (A, b.C)) and not isinstance(x, D)", True),
        ("assert x", False),
        ("assert x == 1", False),
        ("assert x is not None, 'why'", False),
        ("assert x.read()", False),
        ("assert x.read() is not None", False),
        ("assert isinstance(next(x), A)", False),
        ("assert x[key()] is not None", False),
        ("assert (x := y) is not None", False),
        ("assert all(each for each in x)", False),
        ("assert x is not None or y is not None", False),
    ],
)
def test_asserts_only_narrow_types(line: str, narrows: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    found = importlib.import_module("check_asserts").complaints(line, "x.py")
    assert (found == []) == narrows, found


def test_no_assert_of_the_product_decides():
    run(sys.executable, "tools/check_asserts.py")


def test_budgets():
    run(sys.executable, "tools/budgets.py")


def test_readme_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
        assert named, f"{page} names no make command"
        assert named <= targets, f"{page} names what the Makefile lacks"


def test_no_forbidden_words():
    found, forbidden = [], re.compile("|".join(FORBIDDEN))
    for path in tracked_files():
        text = "" if path.suffix in BINARY else path.read_text(encoding="utf-8", errors="replace")
        if not forbidden.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.fixture
def install_torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("install_torch")


@pytest.mark.parametrize("code", [0, 1])
def test_the_size_of_pytorch_is_told_and_a_failure_is_a_note_or_an_error(
    code: int, install_torch: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(install_torch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(install_torch, "choose", lambda requirements, options, cpu: (requirements[0], "CUDA"))
    monkeypatch.setattr(install_torch.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(9e9)))
    monkeypatch.setattr(
        install_torch,
        "PIP",
        [sys.executable, "-c", f"print('pip runs', flush=True); raise SystemExit({code})"],
    )
    assert install_torch.main(["torch==2.15.0"]) is None
    shown = capfd.readouterr().out
    assert "about 3 GB to download, 5 GB on disk" in shown.partition("pip runs")[0]
    assert "TORCH=0" in shown.partition("pip runs")[0]
    assert ("PyTorch was not installed: pip failed with 1" in shown) == bool(code)
    error = install_torch.main(["torch==2.15.0", "--required"])
    assert error is None if code == 0 else "error: PyTorch was not installed" in error
    monkeypatch.setattr(install_torch.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(2e9)))
    assert re.match(
        r"2\.0 GB are free for .*, and 8 needed", install_torch.install(["torch==2.15.0"], [], cpu=False)
    )


@pytest.mark.parametrize(
    "cpu, listing, chosen",
    [
        (False, "2.14.1, 2.13.0+cpu, 2.13.0", ("torch==2.14.1", "CUDA")),
        (True, "2.14.1, 2.13.0+cpu, 2.13.0", ("torch==2.13.0", "CPU")),
        (False, "2.13.0+cpu, 2.13.0", ("torch==2.13.0", "CPU")),
        (False, "2.9.0", ("torch==2.15.0", "")),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one build")
def test_the_first_version_that_pip_has(
    cpu: bool,
    listing: str,
    chosen: tuple[str, str],
    install_torch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
):
    text = f"torch\nAvailable versions: {listing}"
    monkeypatch.setattr(install_torch, "PIP", [sys.executable, "-c", f"print({text!r})"])
    assert install_torch.choose(["torch==2.15.0", "torch==2.14.1", "torch==2.13.0"], [], cpu=cpu) == chosen


# ---- waits end by the monotonic clock: a step of the system's time does not lengthen them ----


@pytest.mark.skipif(os.environ.get("UNISONO_SANITIZED") == "thread", reason="TSan knows only the wall clock")
def test_no_lock_waits_until_a_time_of_the_wall_clock():
    names = Path(_native.__file__).read_bytes().split(b"\0")
    assert not [name for name in names if name.startswith(b"pthread_mutex_timedlock")]


# ---- decoders are made when a module is imported, by one thread ----


def test_no_decode_call_names_a_type() -> None:
    for source in sorted(Path(unisono.__file__).parent.rglob("*.py")):
        text = source.read_text()
        for node in ast.walk(ast.parse(text)) if ".decode(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                named = any(keyword.arg == "type" for keyword in node.keywords)
                assert node.func.attr != "decode" or not named, f"{source}:{node.lineno}"
