"""Programs of MPI: what they compute, against NumPy and models, on several numbers of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S
from python_runs import PATH, fine

PROGRAMS = Path(__file__).resolve().parent / "programs"


def run(ranks: int, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_calls_give_what_numpy_gives(ranks: int) -> None:
    ended = run(ranks, PROGRAMS / "datatypes_and_collectives.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_lowercase_collectives_give_what_plain_python_gives(ranks: int, spread: str) -> None:
    ended = run(ranks, PROGRAMS / "lowercase_collectives.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == ranks


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("bcast", "gather", ("broadcast_object(root=0", "gather_object(root=0")),
        ("gather", "bcast from 1", ("gather_object(root=0", "broadcast_object(root=1")),
        ("bcast", "bcast from 1", ("broadcast_object(root=0", "broadcast_object(root=1")),
        ("gather", "gather to 1", ("gather_object(root=0", "gather_object(root=1")),
        ("allgather", "reduce to 1", ("all_gather_object(", "reduce_object(root=1")),
        ("scatter", "alltoall", ("scatter_object(root=0", "all_to_all_object(")),
        ("allreduce", "scan", ("all_reduce_object(", "scan_object(")),
        ("scan", "exscan", ("scan_object(", "exscan_object(")),
        ("Barrier", "allgather", ("barrier(", "all_gather_object(")),
    ],
)
def test_lowercase_collectives_that_differ_are_named(first: str, second: str, told: tuple[str, str]) -> None:
    ended = run(2, PROGRAMS / "lowercase_mismatches.py", first, second)
    assert ended.returncode != 0
    assert "ranks called different things" in ended.stderr, ended.stderr
    assert all(f"#1 {call}" in ended.stderr for call in told), ended.stderr


MORE = "sizes do not fit: rank 1 sent 24 elements to rank 0, which expected 16 "
FEWER = "sizes do not fit: rank 0 sent 16 elements to rank 1, which expected 24 "
LONGER = "MPI_ERR_TRUNCATE: the message from rank 1 with tag 1 has 24 bytes, the receive buffer 16"


@pytest.mark.parametrize(
    ("name", "where", "refused", "got"),
    [
        ("Gatherv", "world", f"0 got Mismatch {MORE}", "1 got []"),
        ("Gatherv", "twin", f"0 got Exception {LONGER}", "1 got []"),
        ("Scatterv", "world", f"1 got Mismatch {FEWER}", "0 got [0.0, 1.0]"),
        ("Scatterv", "twin", "1 got [2.0, 3.0]", "0 got [0.0, 1.0]"),  # as a shorter message of `Recv`
        ("Allgatherv", "world", f"0 got Mismatch {MORE}", "1 got "),
        ("Alltoallv", "world", f"0 got Mismatch {MORE}", "1 got [2.0, 3.0, 3.0, 4.0]"),
        ("Alltoallv", "twin", f"0 got Exception {LONGER}", "1 got [2.0, 3.0, 3.0, 4.0]"),
        ("Alltoallw", "world", f"0 got Mismatch {MORE}", "1 got [4.0, 5.0, 4.0, 5.0]"),
    ],
)  # fmt: skip
def test_counts_that_differ_between_ranks(name: str, where: str, refused: str, got: str) -> None:
    ended = run(2, PROGRAMS / "counts_differ.py", name, where)
    assert refused in ended.stdout and got in ended.stdout, ended.stdout + ended.stderr


def test_random_messages_keep_the_order_of_mpi() -> None:
    ended = run(3, PROGRAMS / "random_messages.py", "150")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == 3


def test_what_a_rank_sends_arrives_though_its_receive_fails() -> None:
    ended = run(2, PROGRAMS / "too_long_messages.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("ranks", [1, 4])
def test_windows_give_what_mpich_gives(ranks: int, spread: str) -> None:
    """The program also runs with mpi4py and MPICH: MPI_OF=mpi4py mpiexec -n 4 python windows.py."""
    ended = run(ranks, PROGRAMS / "windows.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok") == ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_classes_are_refused_and_the_communicator_goes_on(ranks: int) -> None:
    ended = run(ranks, PROGRAMS / "wrong_classes.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == ranks


def test_a_program_without_a_launcher_is_one_rank() -> None:
    command = [sys.executable, str(PROGRAMS / "is_alone.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_object_may_call_when_python_deletes_it_at_the_end() -> None:
    done = run(3, PROGRAMS / "deletes_at_end.py")
    assert (done.returncode, "total 3" in done.stdout) == (0, True), done.stdout + done.stderr


def test_memory_of_the_host_is_known_in_a_sandbox() -> None:
    assert fine(PROGRAMS / "reads_in_a_sandbox.py", **PATH) == "all is well\n"


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback() -> None:
    ended = run(2, PROGRAMS / "fails_on_rank_one.py")
    assert ended.returncode != 0
    assert "KeyError: 'the reason'" in ended.stderr


def test_threads_and_requests_make_communicators_at_the_same_time() -> None:
    ended = run(3, PROGRAMS / "threads_making_communicators.py", "15")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_start_others(ranks: int) -> None:
    ended = run(ranks, PROGRAMS / "spawns.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == ranks


def test_a_started_process_that_fails_fails_the_job() -> None:
    ended = run(2, PROGRAMS / "spawns.py", "fails later")
    assert ended.returncode != 0
    assert "process 0 that this rank has started ended with 3" in ended.stderr


def test_the_wait_for_a_started_process_names_it_and_has_the_limit_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "6")
    ended = run(1, PROGRAMS / "spawns.py", "never ends")
    assert ended.returncode != 0
    assert "Finalize waits for the end of process 0 (pid " in ended.stderr
    assert "has not ended within UNISONO_TIMEOUT_S=6" in ended.stderr
