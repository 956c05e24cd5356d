"""Programs of MPI: what they compute, against NumPy and models, on several numbers of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S

PROGRAMS = Path(__file__).resolve().parent / "programs"


def run(ranks: int, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_calls_give_what_numpy_gives(ranks: int) -> None:
    ended = run(ranks, PROGRAMS / "datatypes_and_collectives.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == ranks


def test_random_messages_keep_the_order_of_mpi() -> None:
    ended = run(3, PROGRAMS / "random_messages.py", "150")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_windows_give_what_mpich_gives(ranks: int, spread: str) -> None:
    """The program also runs with mpi4py and MPICH: MPI_OF=mpi4py mpiexec -n 4 python windows.py."""
    ended = run(ranks, PROGRAMS / "windows.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok") == ranks


def test_a_program_without_a_launcher_is_one_rank_and_imports_neither_torch_nor_mpi4py() -> None:
    code = (
        "import sys; import unisono; assert 'unisono.mpi' not in sys.modules; from unisono import MPI; "
        "assert MPI.COMM_WORLD.size == 1; assert MPI.COMM_WORLD.allgather(5) == [5]; "
        "assert not {'torch', 'mpi4py', 'pickle5'} & set(sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "from unisono import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise KeyError('the reason')\n"
        "MPI.COMM_WORLD.recv(source=1)\n"
    )
    ended = run(2, program)
    assert ended.returncode != 0
    assert "KeyError: 'the reason'" in ended.stderr
