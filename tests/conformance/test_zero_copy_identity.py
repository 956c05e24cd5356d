"""Zero copy reads and writes the memory of a process as it was then, not to whatever has its number later."""

from __future__ import annotations

from pathlib import Path

import ranks

PROGRAM = Path(__file__).resolve().parent / "programs" / "lends_and_becomes_another.py"


def test_memory_of_an_execed_program_is_not_received() -> None:
    assert ranks.processes(2, PROGRAM) == ["fine\n"] * 2
