"""The same checks as in conformance/, between real processes: only what joins them is new, so few sizes."""

from pathlib import Path

import pytest

import ranks
from effort import cases

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
