"""The command `unisono`: its commands, lazily, and clear words about the rest."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from effort import HANG_S
from unisono.commands import cli


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("unisono ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bnch"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "unknown command 'bnch'. Did you mean 'bench'?" in told


def test_a_command_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("unisono.commands.bench")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int)  # type: ignore[attr-defined]
    module.main = lambda args: args.size  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unisono.commands.bench", module)
    assert cli.main(["bench", "--size", "5"]) == 5


@pytest.mark.parametrize(
    ("command", "missing", "told"),
    [
        ("doctor", "unisono.commands.doctor", "is not part of this build"),
        ("bench", "torch", "pip install 'unisono[torch]'"),
        ("bench", "numpy", "pip install numpy"),
    ],
)
def test_a_missing_module_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, missing: str, told: str
) -> None:
    def refuse(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli.importlib, "import_module", refuse)
    assert cli.main([command]) == 2
    assert told in capsys.readouterr().err


def test_run_imports_neither_numpy_nor_torch() -> None:
    program = Path(__file__).parent / "programs" / "imported_when_needed.py"
    subprocess.run([sys.executable, str(program), "launcher"], check=True, timeout=HANG_S)


def test_output_that_nobody_reads_is_no_error() -> None:
    shell = f"{sys.executable} -m unisono doctor | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.stdout, done.stderr) == ("machine\n", "")
    assert done.returncode in (0, 141)  # head may have waited for the end
