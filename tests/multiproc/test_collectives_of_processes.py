"""The same checks as in conformance/, between real processes: only what joins them is new, so few sizes."""

import subprocess
import sys
from pathlib import Path

import pytest

import ranks
from effort import cases
from loops import each

PROGRAM = Path(__file__).with_name("collectives_program.py")


@pytest.mark.parametrize(
    ("size", "arrays"),
    cases(
        [(1, "plain"), (2, "plain"), (4, "shared"), (3, "mixed")],
        long=[(5, "plain"), (2, "shared")],
    ),
)
def test_collectives_between_processes(size: int, arrays: str) -> None:
    outputs = ranks.processes(size, PROGRAM, arrays)
    assert [output.split()[-1] for output in outputs] == [str(rank) for rank in range(size)]


@each("optimize", ["1", "2"])
def test_collectives_without_asserts(optimize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -O` drops asserts, `-OO` docstrings, too."""
    monkeypatch.setenv("PYTHONOPTIMIZE", optimize)
    program = PROGRAM.with_name("programs") / "runs_optimized.py"
    assert ranks.processes(3, program, timeout_s=60) == ["all right\n"] * 3


def test_help_needs_no_docstrings() -> None:
    for command in ("run", "bench", "simulate", "plan", "network", "draw", "calibrate", "doctor"):
        texts = [
            subprocess.run(
                [sys.executable, *flags, "-m", "unisono", command, "--help"],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for flags in ([], ["-OO"])
        ]
        assert texts[0] == texts[1], command
