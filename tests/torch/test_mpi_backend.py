"""The backend "mpi" replaced, "unisono-mpi" without a library, ranks that only mpiexec has numbered.

Over real libraries of MPI: `make test-backends`.
"""

import os
import subprocess
import sys
from pathlib import Path

from effort import HANG_S
from python_runs import ran

PROGRAM = Path(__file__).resolve().parent / "programs" / "asks_for_a_backend.py"


def test_a_program_for_mpi_runs_over_the_engine():
    done = ran("-m", "unisono", "run", "--replace", "mpi", "-n", "2", PROGRAM, "mpi")
    assert done.returncode == 0, done.stderr
    wanted = [f"[rank {rank}] mpi: 3 ProcessGroupUnisono" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == wanted


def test_ranks_of_mpiexec_meet_without_further_variables():
    place = {"PMIX_NAMESPACE": f"job-of-{os.getpid()}"}
    place |= {f"OMPI_COMM_WORLD_{of}SIZE": "2" for of in ("", "LOCAL_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "unisono"],
            env={**os.environ, **place, **{f"OMPI_COMM_WORLD_{of}RANK": rank for of in ("", "LOCAL_")}},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in "01"
    ]
    ends = [rank.communicate(timeout=HANG_S) for rank in ranks]
    assert [out for out, _ in ends] == ["unisono: 3 ProcessGroupUnisono\n"] * 2, ends


def test_the_error_without_a_library():
    done = ran("-m", "unisono", "run", "-n", "1", PROGRAM, "unisono-mpi")
    assert done.returncode != 0
    assert "backend 'mpi' is not available here" in done.stderr or "MPI knows 1 rank" in done.stderr
