"""`unisono run` with real processes: what ranks print and what they are given."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S
from launching import Launcher
from python_runs import fine, ran

PROGRAMS = Path(__file__).resolve().parent / "programs"


# --- programs of MPI ---


@pytest.mark.parametrize(
    ("size", "variables", "warns"), [(2, {}, True), (2, {"PMI_FD": "9"}, False), (1, {}, False)]
)
def test_a_program_of_mpi4py_is_told_that_its_ranks_are_alone(
    launcher: Launcher, tmp_path: Path, size: int, variables: dict[str, str], warns: bool
) -> None:
    """A library of that name stands for mpi4py; PMI_FD is what a launcher of MPI sets."""
    package = tmp_path / "site" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    library = package / "MPI.mpich.so"
    shutil.copy(find_library(), library)
    launcher.environ.update(variables)
    launcher.environ["PYTHONPATH"] += f":{package.parent}"
    done = launcher.run(PROGRAMS / "loads_a_library.py", "-n", str(size), args=(str(library),))
    assert done.returncode == 0
    assert done.stdout.count("loaded") == size
    lines = [line for line in done.stderr.splitlines() if "mpi4py" in line]
    assert len(lines) == warns
    assert all("each process is alone in it" in line and f"mpiexec -n {size} " in line for line in lines)


def find_library() -> str:
    """Any library that a process can load."""
    found = importlib.util.find_spec("unisono._native")
    assert found is not None and found.origin is not None
    return found.origin


# --- output ---------------------------------------------------------------------------------------


def test_every_line_has_its_prefix_and_its_stream(launcher: Launcher) -> None:
    done = launcher.run(
        "print('a'); print('b', sys.argv[1:]); print('e', file=sys.stderr)", "-n", "3", args=("-n", "x")
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[rank {r}] {text}" for r in range(3) for text in ("a", "b ['-n', 'x']")
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("unisono run:")]
    assert sorted(errors) == ["[rank 0] e", "[rank 1] e", "[rank 2] e"]


def test_long_lines_stay_whole_and_the_tail_arrives(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "prints_long_lines.py", "-n", "4")
    lines = done.stdout.splitlines()
    for rank, letter in enumerate("abcd"):
        assert lines.count(f"[rank {rank}] " + letter * (1 << 20)) == 3
        assert lines.count(f"[rank {rank}] tail of {letter}") == 1
    assert len(lines) == 16


def test_any_bytes_pass(launcher: Launcher) -> None:
    command = launcher.command("os.write(1, bytes(range(256)) + b'\\n' + b'\\xff\\xfe')")
    done = subprocess.run(command, env=launcher.environ, capture_output=True)
    assert (
        done.stdout
        == b"[rank 0] " + bytes(range(256)).replace(b"\n", b"\n[rank 0] ") + b"\n[rank 0] \xff\xfe\n"
    )


def test_log_dir_keeps_a_file_per_rank_and_stream(launcher: Launcher) -> None:
    logs = launcher.folder / "deep" / "logs"
    script = "print('out', rank); os.write(2, b'err %d' % rank)"
    done = launcher.run(script, "-n", "2", "--log-dir", str(logs))
    assert sorted(p.name for p in logs.iterdir()) == [
        f"rank{r}.{s}.log" for r in range(2) for s in ("stderr", "stdout")
    ]
    assert (logs / "rank1.stdout.log").read_text() == "out 1\n"
    assert (logs / "rank1.stderr.log").read_text() == "err 1"
    assert "[rank 1] out 1" in done.stdout and "[rank 1] err 1" in done.stderr


def test_redirects_tee_and_filter_choose_what_is_shown(launcher: Launcher) -> None:
    logs = launcher.folder / "logs"
    flags = ("-n", "3", "--log_dir", str(logs), "-r", "0:3,1:1", "-t", "2:2", "--local_ranks_filter=0,1")
    done = launcher.run("print('out'); print('err', file=sys.stderr)", *flags)
    assert done.stdout == "" and "[rank 1] err" in done.stderr and "[rank 2]" not in done.stderr
    names = sorted(p.name for p in logs.iterdir())
    assert names == ["rank0.stderr.log", "rank0.stdout.log", "rank1.stdout.log", "rank2.stderr.log"]


def test_stdin_goes_to_nobody_unless_asked(launcher: Launcher) -> None:
    script = "print(repr(sys.stdin.read()))"
    done = launcher.run(script, "-n", "2", stdin="typed")
    assert sorted(done.stdout.split()) == sorted(["[rank", "0]", "''", "[rank", "1]", "''"])
    done = launcher.run(script, "-n", "2", "--stdin", stdin="typed")
    assert "[rank 0] 'typed'" in done.stdout and "[rank 1] ''" in done.stdout


# --- the ranks' place -------------------------------------------------------------------------------


def test_environment_of_a_rank(launcher: Launcher) -> None:
    launcher.environ["SLURM_PROCID"] = "0"
    script = "print(*(f'{k}={os.environ.get(k)}' for k in sys.argv[1:]))"
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
        "PYTHONUNBUFFERED", "SLURM_PROCID",
    )  # fmt: skip
    done = launcher.run(script, "--nproc_per_node=2", "--standalone", args=names)
    assert (
        "[rank 1] RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 "
        "PYTHONUNBUFFERED=1 SLURM_PROCID=None" in done.stdout
    )


def test_threads_are_shared_out_unless_chosen(launcher: Launcher) -> None:
    script = "print(os.environ['OMP_NUM_THREADS'])"
    cores = len(os.sched_getaffinity(0))
    done = launcher.run(script, "-n", "2")
    assert f"[rank 1] {max(1, cores // 2)}\n" in done.stdout and "OMP_NUM_THREADS=" in done.stderr
    launcher.environ["OMP_NUM_THREADS"] = "7"
    done = launcher.run(script, "-n", "2")
    assert "[rank 1] 7\n" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("threads_each", "chosen", "policy"),
    [("all", {}, "PASSIVE"), ("1", {}, None), ("all", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
     ("all", {"GOMP_SPINCOUNT": "10"}, None)],
)  # fmt: skip
def test_more_threads_than_cores_sleep_when_idle(
    launcher: Launcher, threads_each: str, chosen: dict[str, str], policy: str | None
) -> None:
    """Otherwise OpenMP's threads poll for work on the cores where the other ranks have some."""
    threads = str(max(2, len(os.sched_getaffinity(0)))) if threads_each == "all" else threads_each
    launcher.environ.update(OMP_NUM_THREADS=threads, **chosen)
    done = launcher.run("print(os.environ.get('OMP_WAIT_POLICY'))", "-n", "2")
    assert f"[rank 1] {policy}\n" in done.stdout


def test_the_master_port_is_free_for_rank_0_and_the_store_answers(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "asks_for_both_ports.py", "-n", "2")
    assert done.stdout.count("fine") == 2, done.stderr


def test_a_taken_master_port_is_one_line(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = launcher.run("", "-n", "2", "--master-port", port)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and port in done.stderr and "--master-port" in done.stderr


def test_board_says_who_ended_of_what(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "reads_the_board.py", "-n", "4", "--grace", "30")
    assert "[rank 0] 1:0 3:9 2:9 2:0" in done.stdout, done.stdout + done.stderr
    assert "[rank 0] read-only" in done.stdout


def test_another_file_with_the_boards_number_is_not_the_board(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "takes_a_file_for_the_board.py")
    assert "PeerLost 1" in done.stdout and "0 7" in done.stdout, done.stdout + done.stderr


def test_sixteen_ranks(launcher: Launcher) -> None:
    done = launcher.run("print(rank)", "-n", "16")
    assert sorted(done.stdout.splitlines()) == sorted(f"[rank {r}] {r}" for r in range(16))


def test_a_program_and_a_module_can_be_run(launcher: Launcher) -> None:
    run = ("-m", "unisono", "run", "-n", "2")
    done = ran(*run, "--no-python", "sh", "-c", "echo $RANK")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    assert "[rank 1] usage" in fine(*run, "-m", "json.tool", "--help")


def test_output_that_cannot_be_written_is_told(launcher: Launcher) -> None:
    command = launcher.command("print('x')", "-n", "2")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=launcher.environ, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 0 and done.stderr.count(b"output is lost: No space left on device") == 1


def test_started_without_standard_descriptors(launcher: Launcher) -> None:
    command = [
        "sh",
        "-c",
        'exec "$@" <&- >&- 2>&-',
        "sh",
        *launcher.command("print('x'); sys.exit(3)", "-n", "2"),
    ]
    assert subprocess.run(command, env=launcher.environ).returncode == 3


# ---- what `make demo` shows without PyTorch: ranks train, and name the one that is killed ----


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"


def test_ranks_train_and_name_the_one_that_is_killed():
    done = ran("-m", "unisono", "run", "-n", "3", EXAMPLE, "--seconds", "2", "--lose-a-rank")
    assert done.returncode == 137, done.stdout + done.stderr
    first, last = re.search(r"loss (\d\.\d\d) -> (\d\.\d\d), the same bits on 3 ranks", done.stdout).groups()
    assert float(last) < float(first) - 0.3
    pid = re.search(r"\[rank 2\] kill -9 (\d+)\n", done.stdout)[1]
    assert f"PeerLost: barrier failed: rank 2 (pid {pid}) was ended by SIGKILL" in done.stderr


def test_old_command_starts_the_example_of_the_package():
    command = [sys.executable, "-m", "unisono", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        shown = demo.stdout.readline()
        demo.terminate()  # it trains for ten seconds on all cores; the test above sees the end
        said = demo.communicate(timeout=HANG_S)[1]
    assert demo.returncode == 128 + signal.SIGTERM, shown + said
    assert "is now `unisono run -n 4 -m unisono.examples.language_model --lose-a-rank`" in said
    assert re.match(r"\[rank 0\] step +\d+   loss \d", shown), shown + said


def test_ranks_go_on_without_the_one_that_is_killed():
    words = [
        "run",
        "--elastic",
        "2:3",
        "--respawn",
        "3",
        str(EXAMPLE.with_name("elastic.py")),
        "--lose-a-rank",
    ]
    done = ran('-m', 'unisono', *words, PAUSE_S='0.03')  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is out: ended by SIGKILL; 2 ranks go on" in done.stderr
    # On a busy machine the others may be done before the replacement has started.
    assert done.stdout.count("the largest eigenvalue is") in (2, 3), done.stdout
