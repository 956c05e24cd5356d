"""The same checks as in conformance/, between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks

PROGRAM = Path(__file__).with_name("collectives_program.py")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_collectives_between_processes(size: int) -> None:
    outputs = ranks.processes(size, PROGRAM)
    assert [output.split()[-1] for output in outputs] == [str(rank) for rank in range(size)]
