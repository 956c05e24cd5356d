"""The same checks as in conformance/, between real processes: only what joins them is new, so few sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks

PROGRAM = Path(__file__).with_name("collectives_program.py")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives_between_processes(size: int) -> None:
    outputs = ranks.processes(size, PROGRAM)
    assert [output.split()[-1] for output in outputs] == [str(rank) for rank in range(size)]
