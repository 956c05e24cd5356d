"""A Mismatch shows where in the caller's source every rank was: between processes, from real files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un

PROGRAM = """
import os, sys, time
import numpy as np
import unisono as un
from unisono.diagnosis import read
read.REMARK_PATIENCE_S = 20  # a rank may get no turn on a core for a while
group = un.init_process_group(init_method=os.environ["MEETING"], timeout=30)
rank, case = group.rank, os.environ.get("CASE")


def told(call):
    inner = group.subgroup(range(group.size))
    try:
        call(inner)
    except un.Mismatch as error:
        print(str(error).replace(inner.name, "group"), flush=True)
    print("--", flush=True)
    inner.close()


def blocking(g):
    if rank == 1:
        g.all_reduce(np.ones(3), un.MAX)  # A
    g.all_reduce(np.ones(3))  # B


def queued(g):
    work = (
        g.all_reduce(np.ones(2), async_op=True)  # C
        if rank == 1
        else g.all_reduce(np.ones(3), async_op=True)  # D
    )
    time.sleep(0.3)
    work.wait()


def ahead(g):
    g.broadcast(np.ones(3), 0) if rank == 0 else None  # E: rank 0 could finish this alone
    g.barrier()  # F


def message(g):
    g.recv(np.ones(3), 1, 5) if rank == 0 else g.send(np.ones(2, np.int32), 0, 5)  # G
    g.barrier()


for call in (blocking, queued, ahead, message):
    told(call)
group.close()
"""


def _line(lines: list[str], mark: str) -> int:
    return next(number for number, line in enumerate(lines, 1) if f"# {mark}" in line)


def test_all_ranks_show_the_lines_of_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        outputs = [output.split("--\n") for output in ranks.processes(2, program)]
    lines = PROGRAM.splitlines()
    at = {mark: f"at {program}:{_line(lines, mark)}" for mark in "ABCDEFG"}
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
    program = """
import os, torch, torch.distributed as dist, unisono.torch
rank = int(os.environ["RANK"])
dist.init_process_group("unisono", init_method=os.environ["MEETING"], rank=rank, world_size=2)
try:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))  # here
except Exception as error:
    print(error)
dist.destroy_process_group()
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        for output in ranks.processes(2, path):
            assert output.count(f"at {path}:6") == 2, output


def test_a_rank_that_is_elsewhere_does_not_hold_up_the_others() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 2:
            return  # and never calls
        with pytest.raises(un.Mismatch, match="rank 2  #1 not there yet"):
            group.all_reduce(np.ones(3 + group.rank))

    ranks.threads(3, work)
