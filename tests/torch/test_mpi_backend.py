"""The backend "mpi" replaced, "unisono-mpi" without a library, ranks that only mpiexec has numbered.

Over real libraries of MPI: `make test-backends`.
"""

import json
import os
from pathlib import Path

import suite
from python_runs import ran

PROGRAM = suite.HERE / "programs" / "asks_for_a_backend.py"


def test_a_program_for_mpi_runs_over_the_engine():
    done = ran("-m", "unisono", "run", "--replace", "mpi", "-n", "2", PROGRAM, "mpi")
    assert done.returncode == 0, done.stderr
    wanted = [f"[rank {rank}] mpi: 3 ProcessGroupUnisono" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == wanted


def test_ranks_of_mpiexec_meet_without_further_variables(forks: suite.Forks, tmp_path: Path):
    place = {"PMIX_NAMESPACE": f"job-of-{os.getpid()}"}
    place |= {f"OMPI_COMM_WORLD_{of}SIZE": "2" for of in ("", "LOCAL_")}
    ranks = [(None, place | {f"OMPI_COMM_WORLD_{of}RANK": rank for of in ("", "LOCAL_")}) for rank in "01"]
    job = ("on_hosts", 2, [json.dumps(ranks), str(PROGRAM), "unisono"])
    printed = forks.run(tmp_path, {"mpiexec": job})["mpiexec"]
    assert printed == [f"rank {rank}:\nunisono: 3 ProcessGroupUnisono\n" for rank in "01"]


def test_the_error_without_a_library(forks: suite.Forks, tmp_path: Path):
    (printed,) = forks.run_program(tmp_path, 1, PROGRAM, "unisono-mpi", dead=1)
    assert "backend 'mpi' is not available here" in printed or "MPI knows 1 rank" in printed
