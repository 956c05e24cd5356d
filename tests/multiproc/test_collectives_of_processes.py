"""The same checks as in conformance/, between real processes: only what joins them is new, so few sizes."""

from pathlib import Path

import numpy as np
import pytest

import cases
import effort
import operations
import oracle
import ranks
import unisono as un
from loops import each
from python_runs import fine
from unisono.commands.cli import COMMANDS
from unisono.plans import ALGORITHMS

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.ranks(effort.cases([4], long=[1, 2, 3, 5]))
def test_collectives_between_processes(ranks: int) -> None:
    shared = {4: 2, 3: 3, 2: 2}.get(ranks, 0)  # so many have arrays that others map
    with (
        un.init_process_group() as group,  # its thread ends with the test
        operations.arrays_from(un.empty if group.rank < shared else np.empty),
    ):
        for dtype, op in oracle.pairs():
            for numel in cases.FEW:
                cases.all_reduce(group, dtype, op, "two_shot", numel)
        for numel in cases.sizes(4, group.size):
            for algorithm in ALGORITHMS["all_reduce"]:
                cases.all_reduce(group, "float32", un.SUM, algorithm, numel)
        for dtype in ("float32", "bfloat16", "int64"):
            for numel in (0, 1, 1000, 70_000):
                cases.moves(group, dtype, numel)
                cases.reduce(group, dtype, un.SUM, "direct", numel)
                cases.reduce_scatter(group, dtype, un.SUM, "direct", numel, in_place=False)
        cases.uneven(group)
        cases.in_flight(group)


@each("optimize", ["1", "2"])
def test_collectives_without_asserts(optimize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -O` drops asserts, `-OO` docstrings, too."""
    monkeypatch.setenv("PYTHONOPTIMIZE", optimize)
    program = PROGRAMS / "runs_optimized.py"
    assert ranks.processes(3, program, timeout_s=60) == ["all right\n"] * 3


def test_help_needs_no_docstrings() -> None:
    program = PROGRAMS / "prints_help.py"
    printed = fine(program)
    assert printed == fine("-OO", program)
    assert printed.count("usage: ") == len(COMMANDS)
