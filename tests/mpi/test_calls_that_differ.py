"""Ranks that call different collectives, roots, operations or lengths: a Mismatch with each rank's line."""

import re

import pytest
from test_mpi_programs import PROGRAMS, run

PROGRAM = PROGRAMS / "calls_differ.py"
CASES = re.findall(r'^    "(.*)": lambda', PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("case", CASES)
def test_a_mismatch_names_both_calls(case: str) -> None:
    ended = run(2, PROGRAM, case)
    assert ended.returncode != 0
    says = {"Allgatherv lengths": "out has 24 elements for rank 1, x has 16"}.get(case, "errors.Mismatch: ")
    assert says in ended.stderr
