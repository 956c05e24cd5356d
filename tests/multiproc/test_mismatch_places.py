"""A Mismatch shows where in the caller's source every rank was: between processes, from real files."""

from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un

PROGRAMS = Path(__file__).resolve().parent / "programs"


def _at(program: Path, mark: str) -> str:
    """As a Mismatch names the line with this mark."""
    lines = enumerate(program.read_text().splitlines(), 1)
    number = next(number for number, line in lines if f"# {mark}" in line)
    return f"at {program}:{number}"


def test_all_ranks_show_the_lines_of_all() -> None:
    program = PROGRAMS / "calls_in_different_lines.py"
    outputs = [output.split("--\n") for output in ranks.processes(2, program)]
    at = {mark: _at(program, mark) for mark in "ABCDEFG"}
    for blocking, queued, ahead, message, _ in outputs:
        lines = blocking.splitlines()
        assert lines[1] == f"  rank 0  #1 all_reduce(float64[3], SUM, algorithm=one_shot)  {at['B']}"
        assert lines[2] == f"  rank 1  #1 all_reduce(float64[3], MAX, algorithm=one_shot)  {at['A']}"
        lines = queued.splitlines()
        assert lines[1] == f"  rank 0  #1 all_reduce(float64[3], SUM, algorithm=one_shot)  {at['D']}"
        assert lines[2] == f"  rank 1  #1 all_reduce(float64[2], SUM, algorithm=one_shot)  {at['C']}"
        lines = ahead.splitlines()
        assert lines[1].startswith("  rank 0  #1 broadcast(float64[3], root=0, algorithm=direct)  ")
        assert lines[1].endswith((f"{at['E']}", f"(by now {at['F']})"))
        assert lines[2] == f"  rank 1  #1 barrier(algorithm=direct)  {at['F']}"
        assert f"recv {at['G']}" in message
        assert "got int32[2], expected float64[3]" in message
        assert "from rank 1 with tag 5" in message
    for one, other in zip(*outputs, strict=True):  # but for the first line, which says who tells
        assert one.splitlines()[1:] == other.splitlines()[1:]


def test_line_of_a_call_through_torch_is_the_users() -> None:
    pytest.importorskip("torch")
    program = PROGRAMS / "brings_another_size_to_torch.py"
    for output in ranks.processes(2, program):
        assert output.count(_at(program, "here")) == 2, output


def test_a_rank_that_is_elsewhere_does_not_hold_up_the_others() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 2:
            return  # and never calls
        with pytest.raises(un.Mismatch, match="rank 2  #1 not there yet"):
            group.all_reduce(np.ones(3 + group.rank))

    ranks.threads(3, work)
