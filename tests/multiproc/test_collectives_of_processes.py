"""The same checks as in conformance/, between real processes: only what joins them is new, so few sizes."""

from pathlib import Path

import pytest

import ranks
from effort import cases
from loops import each
from python_runs import fine
from unisono.commands.cli import COMMANDS

PROGRAM = Path(__file__).with_name("collectives_program.py")


@pytest.mark.parametrize(
    ("size", "arrays"),
    cases(
        [(4, "shared"), (3, "mixed")],  # of the mixed ones two have plain arrays
        long=[(1, "plain"), (5, "plain"), (2, "shared")],
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
    program = PROGRAM.with_name("programs") / "prints_help.py"
    printed = fine(program)
    assert printed == fine("-OO", program)
    assert printed.count("usage: ") == len(COMMANDS)
