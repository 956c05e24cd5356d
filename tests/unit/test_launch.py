"""The launcher's parts that need no rank: flags, summary, board, lines on the screen."""

import argparse
import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from effort import HANG_S
from loops import each
from unisono.commands.launch.console import LONGEST_LINE_NBYTES, prefix_of
from unisono.commands.launch.job import Assignment, Job, add_arguments, job_from, rank_environment
from unisono.commands.launch.process import LEAVE_S, SignalEscalation, StatusBoard
from unisono.commands.launch.supervisor import write_record
from unisono.errors import LaunchError

PROGRAMS = Path(__file__).parent / "programs"

# --- flags ---------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported by the launcher')")
    (tmp_path / "pack" / "inner.py").write_text("")
    return "train.py"


def parse(*words: str, environ: dict[str, str] | None = None) -> tuple[Job, list[str]]:
    parser = argparse.ArgumentParser(prog="unisono run")
    add_arguments(parser)
    return job_from(parser.parse_args(words), environ or {"PATH": os.environ["PATH"]})


def test_without_a_number_one_process_is_started_and_said(script: str) -> None:
    job, remarks = parse(script)
    assert job.world_size == 1
    assert remarks == [
        f"without -n it starts one process; -n 4 starts four, -n cpu {len(os.sched_getaffinity(0))} here"
    ]


@each("flag", ["-n", "--nproc-per-node", "--nproc_per_node"])
def test_number_of_ranks(script: str, flag: str) -> None:
    assert parse(flag, "3", script)[0].world_size == 3
    assert parse(flag, "3", script)[1] == []
    assert parse(flag, "cpu", script)[0].world_size == len(os.sched_getaffinity(0))
    assert parse(flag, "gpu", script, environ={"CUDA_VISIBLE_DEVICES": "0,2"})[0].world_size == 2


def test_arguments_of_the_script_are_its_own(script: str) -> None:
    job, _ = parse("-n", "2", script, "-n", "7", "--module", "--", "x")
    assert job.world_size == 2 and job.command[1:] == (script, "-n", "7", "--module", "--", "x")
    assert parse("-n", "2", "--", script, "-h")[0].command[1:] == (script, "-h")


def test_module_is_found_without_being_imported(script: str) -> None:
    assert parse("-m", "pack.inner", "a")[0].command[1:] == ("-m", "pack.inner", "a")
    assert parse("--module", "json.tool")[0].command[1:] == ("-m", "json.tool")


def test_torchrun_lines_are_understood(script: str) -> None:
    line = (
        "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts 0 --rdzv_backend c10d --rdzv-endpoint=h:0"
    )
    job, remarks = parse(*line.split(), "--node-rank", "0", "--master_port", "29511", script)
    assert job.world_size == 2 and job.master_port == 29511
    assert remarks == ["--rdzv-endpoint has no meaning here and changes nothing"]


@each(
    ("words", "told"),
    [
        (["-n", "0", "train.py"], "-n does not fit: got '0', expected 1.."),
        (["-n", "two", "train.py"], "got 'two'"),
        (["-n", "", "train.py"], "got ''"),
        (["-n", "99999", "train.py"], "got '99999'"),
        (["nope.py"], "script 'nope.py' does not exist"),
        (["sh", "train.py"], "'sh' is a program"),
        (["pack"], "without __main__.py"),
        (["-m", "nope"], "module 'nope' was not found"),
        (["-m", "pack.nope"], "module 'pack.nope' was not found"),
        (["-m", "pack.inner.x"], "'inner' is not a package"),
        (["-m", "pack"], "has no __main__"),
        (["--no-python", "nope-program"], "'nope-program' was not found"),
        (["--no-python", "-m", "json"], "exclude each other"),
        (["--nnodes", "2", "train.py"], "--nnodes above 1 needs --master-addr"),
        (["--nnodes", "2", "--master-addr", "a", "train.py"], "several nodes need one token"),
        (["--nnodes", "1:4", "train.py"], "for ranks that come and go: --elastic MIN:MAX"),
        (["--token-file", "/no/such/dir/token", "train.py"], "--token-file"),
        (["--node_rank", "1", "train.py"], "--node-rank does not fit: got '1', expected 0"),
        (["--master-port", "70000", "train.py"], "--master-port does not fit"),
        (["--max-restarts", "3", "train.py"], "use --elastic MIN:MAX and --respawn N"),
        (["--virtual-local-rank", "train.py"], "--virtual-local-rank is not supported"),
        (["--tee", "3", "train.py"], "need --log-dir"),
        (["--log-dir", "x", "--tee", "4", "train.py"], "--tee does not fit: got '4', expected 0..3"),
        (["--log-dir", "x", "-r", "5:1", "train.py"], "--redirects does not fit: got '5', expected 0"),
        (["--log-dir", "train.py", "train.py"], "cannot be made"),
        (["--local-ranks-filter", "1", "train.py"], "--local-ranks-filter does not fit"),
        (["--grace", "-1", "train.py"], "--grace does not fit"),
        (["-n", "gpu", "train.py"], "no NVIDIA GPU"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(script: str, words: list[str], told: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(*words, environ={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""})
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_streams_per_rank(script: str) -> None:
    job, _ = parse("-n", "3", "--log-dir", "logs", "-t", "0:3,2:1", "-r", "1:2", script)
    assert job.logged == (3, 2, 1) and job.shown == (3, 1, 3)
    job, _ = parse("-n", "2", "--log-dir", "logs", script)
    assert job.logged == (3, 3) and job.shown == (3, 3)


def test_environment_drops_the_place_another_launcher_gave(script: str) -> None:
    job, _ = parse("-n", "2", script)
    base = {
        "SLURM_PROCID": "5",
        "SLURM_JOB_ID": "9",
        "OMPI_COMM_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "x",
        "HOME": "/",
    }
    made = rank_environment(job, 1, base, assignment=Assignment("127.0.0.1:5", 6, 3, 8), status_fd="7:12")
    assert made.keys() & base.keys() == {"SLURM_JOB_ID", "HOME"}
    assert (made["RANK"], made["MASTER_PORT"], made["UNISONO_STORE"], made["UNISONO_STATUS_FD"]) == (
        "4", "6", "127.0.0.1:5", "7:12",
    )  # fmt: skip


# --- the end ---------------------------------------------------------------------------------------------


def test_a_launcher_that_was_stopped_still_gives_time_between_two_signals() -> None:
    ending = SignalEscalation((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
    late = time.monotonic() + 100.0
    assert ending.pop(late) == signal.SIGTERM and ending.due == late + 3.0
    assert ending.pop(late + 2.9) is None and not ending.killing
    assert ending.pop(late + 50.0) == signal.SIGKILL and ending.killing


def test_sigkill_is_repeated_and_given_up_after_a_minute_of_it() -> None:
    ending = SignalEscalation((0.0, signal.SIGKILL))
    ending.pop(time.monotonic() + 1000.0)  # we were stopped: those who are left did not have that time
    told_after = []
    kills = 0
    while not ending.in_vain:
        assert ending.due is not None and ending.pop(ending.due) == signal.SIGKILL
        kills += 1
        if ending.to_be_reported():
            told_after.append(kills)
    assert told_after == [20] and kills == LEAVE_S / 0.5


def test_a_long_record_is_written_whole_although_a_signal_comes(pipe: tuple[io.FileIO, io.FileIO]) -> None:
    reader, writer = pipe
    seen = []
    full = threading.Event()  # set by the signal: the pipe is full then and the write has written a part

    def read() -> None:
        full.wait(HANG_S)
        while data := reader.read(1 << 16):
            seen.append(data)

    feeder = threading.Thread(target=read)
    feeder.start()
    previous = signal.signal(signal.SIGALRM, lambda *_: full.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        write_record(writer.fileno(), {"report": "x" * 200_000})
    finally:
        signal.signal(signal.SIGALRM, previous)
        full.set()
        writer.close()
        feeder.join()
    assert b"".join(seen) == b'{"report":"' + b"x" * 200_000 + b'"}\n'


# --- board and screen -------------------------------------------------------------------------------------


def test_board_layout() -> None:
    board = StatusBoard(3)
    board.started(1, 4121)
    board.started(2, 4122)
    board.ended(2, code=9, signaled=True)
    assert struct.unpack("<12i", os.pread(board.fd, 99, 0)) == (0, 0, 0, 0, 4121, 1, 0, 0, 4122, 3, 9, 0)
    with pytest.raises(OSError):
        os.ftruncate(board.fd, 0)
    board.close()


def console(case: str, terminal: bool = False) -> bytes:
    """What the program shows in a case: stdout and stderr are one pipe, or one terminal."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    with open(ours, "rb", buffering=0) as reader, open(theirs, "wb", buffering=0) as writer:
        command = [sys.executable, str(PROGRAMS / "shows_on_a_console.py"), case]
        with subprocess.Popen(command, stdout=writer, stderr=writer) as process:
            writer.close()
            shown = b"".join(read_all(reader))
    assert process.returncode == 0, shown[-5000:]
    return shown


def read_all(reader: io.FileIO) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while piece := reader.read(1 << 20):
            yield piece


def test_prefix() -> None:
    assert prefix_of(12, color=False) == b"[rank 12] "
    assert prefix_of(1, color=True).startswith(b"\x1b[") and b"[rank 1]" in prefix_of(1, color=True)


def test_an_open_line_is_continued_by_its_owner_and_ended_for_others() -> None:
    assert console("lines_of_two") == b"A one line\nA two \nB x\nA lines\nB y\ndone\n"


def test_a_carriage_return_keeps_the_name_on_a_terminal_only() -> None:
    assert console("progress_bar", terminal=True) == b"A \rA 10%"
    assert console("progress_bar") == b"A \r10%"


@pytest.fixture
def pipe() -> Iterator[tuple[io.FileIO, io.FileIO]]:
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as reader, open(write, "wb", buffering=0) as writer:
        yield reader, writer


def test_a_stream_shows_whole_lines_and_its_tail() -> None:
    assert console("lines_of_a_stream") == b"A begun and ended\nA again\n"


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    assert console("line_without_end") == b"A " + b"x" * (LONGEST_LINE_NBYTES + 100_000) + b"\n"


def test_reading_pauses_while_the_console_is_behind() -> None:
    assert console("more_than_is_taken") == b"[rank 0] x\n" * (4 << 20)


def test_tls_without_its_package_is_refused_in_one_line(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(LaunchError, match=r"pip install 'unisono\[tls\]'"):
        parse("--tls", script)
