"""`unisono run` on several hosts: one job, one end, one exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hosts
from effort import HANG_S, judge_time

pytestmark = pytest.mark.hosts

PATCHED = str(Path(__file__).resolve().parents[1] / "multiproc" / "launcher_program.py")
PROGRAM = str(Path(__file__).resolve().parent / "programs" / "comes_from_a_host.py")


@pytest.fixture(scope="module")
def net() -> Iterator[hosts.Network]:
    with hosts.hosts(2) as network:
        yield network


class Job:
    """The launchers of one job, one per host."""

    def __init__(self, net: hosts.Network, folder: Path) -> None:
        self.net = net
        self.token = folder / "token"
        self.unisono = ["-m", "unisono"]

    def argv(self, node: int, nproc: int, *flags: str, how: str = "tells", address: str = "") -> list[str]:
        """The command of one node, whose ranks run `comes_from_a_host.py`."""
        launcher = ["env", "--default-signal=INT,TERM,HUP", sys.executable, *self.unisono, "run"]
        where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", address or self.net[0].address]
        return [*launcher, *where, "--token-file", str(self.token), "-n", str(nproc), *flags, PROGRAM, how]

    def start(self, how: str, *flags: str, **options: Any) -> list[subprocess.Popen[str]]:
        """Node 0 with two ranks, node 1 with one."""
        first = self.net[0].start(self.argv(0, 2, *flags, how=how, **options))
        hosts.wait_until(self.token.exists)
        return [first, self.net[1].start(self.argv(1, 1, *flags, how=how, **options))]


@pytest.fixture
def job(net: hosts.Network, tmp_path: Path) -> Job:
    return Job(net, tmp_path)


def ended(launchers: list[subprocess.Popen[str]], timeout: float = HANG_S) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    found = []
    for each in launchers:
        out, errors = each.communicate(timeout=timeout)
        found.append((each.returncode, out, errors))
    return found


@pytest.mark.parametrize("flags", [(), ("--tls",)], ids=["plain", "tls"])
def test_ranks_are_numbered_node_by_node(job: Job, flags: tuple[str, ...]):
    results = ended(job.start("tells", *flags))
    assert [code for code, _, _ in results] == [0, 0], results
    places = sorted(line for _, out, _ in results for line in out.splitlines())
    assert places == [
        "[rank 0] place 0 0 3 2 0 2 host0",
        "[rank 1] place 1 1 3 2 0 2 host0",
        "[rank 2] place 2 0 3 1 1 2 host1",
    ]
    assert oct(job.token.stat().st_mode & 0o777) == "0o600"


def test_ipv6(job: Job):
    results = ended(job.start("tells", address=job.net[0].address6))
    assert [code for code, _, _ in results] == [0, 0], results


def test_a_failure_on_one_node_ends_all_and_is_named_by_all(job: Job):
    results = ended(job.start("fails"))
    assert [code for code, _, _ in results] == [1, 1], results
    assert "rank 2 on node 1 (host host1) failed first: exit code 1" in results[0][2]
    assert "rank 2 failed first: exit code 1" in results[1][2]
    for _, _, errors in results:
        assert "ValueError: label 10 is out of range" in errors


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_on_any_node_ends_all(job: Job, number: int):
    launchers = job.start("sleeps")
    for each in launchers:
        assert each.stdout is not None and "up" in each.stdout.readline()
    launchers[number].send_signal(signal.SIGINT)
    results = ended(launchers, 20)
    assert [code for code, _, _ in results] == [130, 130], results
    assert f"interrupted on node {number}" in results[1 - number][2]


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_is_killed_ends_all(job: Job, number: int):
    job.unisono = [PATCHED, "silence_is_soon_told"]
    launchers = job.start("sleeps")
    for each in launchers:
        assert each.stdout is not None and "up" in each.stdout.readline()
    job.net[number].kill()
    launchers[number].communicate()
    started = time.monotonic()
    code, _, errors = ended([launchers[1 - number]], 60)[0]
    assert code != 0
    judge_time(time.monotonic() - started, 20)  # 4 s of silence; nobody waits for the dead node's word
    assert f"node {number} (host host{number})" in errors, errors


def test_a_node_without_the_token_is_refused(job: Job, tmp_path: Path):
    first = job.net[0].start(job.argv(0, 1))
    hosts.wait_until(job.token.exists)
    other = Job(job.net, tmp_path)
    other.token = tmp_path / "other"
    other.token.write_text("00" * 32)
    other.token.chmod(0o600)
    refused = job.net[1].run(other.argv(1, 1))
    assert refused.returncode == 2 and "token" in refused.stderr, refused
    first.send_signal(signal.SIGINT)
    assert ended([first])[0][0] == 130


def test_nodes_that_disagree_are_told(job: Job):
    first = job.net[0].start(job.argv(0, 1))
    hosts.wait_until(job.token.exists)
    again = job.net[1].run(job.argv(0, 1, address=job.net[0].address))
    assert again.returncode == 2, again
    three = job.net[1].run([word.replace("2", "3") if word == "2" else word for word in job.argv(1, 1)])
    assert three.returncode == 2 and "--nnodes is 3 here and 2" in three.stderr, three
    first.send_signal(signal.SIGTERM)
    assert ended([first])[0][0] == 143


def test_the_environment_of_this_process_says_nothing(net: hosts.Network):
    """A stray variable here would make the tests above mean something else."""
    stray = {name for name in os.environ if name.startswith(("UNISONO_", "SLURM_", "OMPI_", "PMI_"))}
    assert not stray - {"UNISONO_SANITIZED", "UNISONO_CALIBRATION"}  # of tools/sanitize.sh and conftest.py
