"""`unisono run --replace mpi4py`: the package mpi4py in the ranks, its modules, and how jobs end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launcher, launching

PROGRAMS = Path(__file__).resolve().parent / "programs"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "mpi"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        ("halo", 4, "heat on 2 x 2 ranks after 50 steps: 7215.596211"),
        ("halo", 3, "heat on 3 x 1 ranks after 50 steps: 7215.596211"),
        ("sample_sort", 3, "15000 numbers sorted"),
        ("nbody_ring", 3, "180 bodies; the largest acceleration"),
        ("conjugate_gradient", 2, "100 unknowns in"),
        ("spawn", 1, "pi is 3.141593, by 3 new ranks"),
    ],
)
def test_an_example_runs(launcher: Launcher, name: str, ranks: int, says: str) -> None:
    done = launcher.run(EXAMPLES / f"{name}.py", "--replace", "mpi4py", "-n", str(ranks))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_the_modules_of_mpi4py_are_unisonos(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "package.py", "--replace", "mpi4py", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok") == 2


@pytest.mark.parametrize(
    ("name", "value", "warned", "begins"),
    [
        ("threads", "2", True, True),
        ("initialize", "'y'", True, True),
        ("initialize", "None", True, True),
        ("initialize", "'no'", False, False),
        ("initialize", "'yes'", False, True),
        ("finalize", "'x'", True, True),
        ("finalize", "None", False, True),
        ("thread_level", "['single']", True, True),
        ("irecv_bufsz", "-5", True, True),
        ("irecv_bufsz", "0", False, True),
        ("errors", "''", True, True),
    ],
)
def test_a_setting_that_means_nothing_is_warned_of(
    launcher: Launcher, name: str, value: str, warned: bool, begins: bool
) -> None:
    """As by mpi4py, whose words these are."""
    program = PROGRAMS / "unexpected_settings.py"
    done = launcher.run(program, "--replace", "mpi4py", "-n", "1", args=(name, value))
    assert done.returncode == 0, done.stderr
    text = f"mpi4py.rc.{name}: unexpected value {value}"
    assert f"{[text] if warned else []} {begins} True" in done.stdout


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        (("-m", "mpi4py.futures"), (), 3),
        (("-m", "mpi4py.futures"), (), 1),
        ((), (), 1),  # it starts its workers
        ((), ("comm",), 3),
        ((), ("comm",), 1),
    ],
)
def test_futures_run_on_the_ranks_of_the_job(
    launcher: Launcher, before: tuple[str, ...], after: tuple[str, ...], ranks: int
) -> None:
    flags = ("--replace", "mpi4py", "-n", str(ranks), *before)
    done = launcher.run(PROGRAMS / "futures.py", *flags, args=after)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all futures ok") == 1


@pytest.mark.parametrize(
    ("what", "code", "says"),
    [
        ("raise", 1, "ValueError: no such file: data-1.npy"),
        ("kill", 137, "rank 1 failed first: SIGKILL"),
        ("abort", 3, "rank 1 failed first: exit code 3"),
        ("address", 1, "Unisono is no MPI library"),
    ],
)
def test_an_error_of_one_rank_ends_the_job(launcher: Launcher, what: str, code: int, says: str) -> None:
    done = launcher.run(PROGRAMS / "fails.py", "--replace", "mpi4py", "-n", "3", args=(what,))
    assert done.returncode == code
    assert says in done.stderr


def test_files(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    done = launcher.run(PROGRAMS / "files.py", "--replace", "mpi4py", "-n", "3", args=(str(folder),))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("files ok") == 3
    assert list(folder.iterdir()) == []


def test_a_rank_that_dies_in_a_collective_write_harms_no_other_bytes(
    launcher: Launcher, tmp_path: Path
) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"." * 3000)
    done = launcher.run(PROGRAMS / "dies_writing.py", "--replace", "mpi4py", "-n", "3", args=(str(file),))
    assert done.returncode == 137
    assert "rank 1 failed first: SIGKILL" in done.stderr
    left = file.read_bytes()
    assert left[:1000] == b"." * 1000
    assert left[2500:] == b"." * 500
