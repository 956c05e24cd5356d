"""Slurm starts the ranks: srun, sbatch, a task that dies, scancel, a time limit; on one host and on two.

No variable is set: where the ranks meet comes from the step.
"""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
import slurm
from started import PROGRAM, VERSIONS, lines, sums

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]
RUN = [sys.executable, PROGRAM]


@pytest.fixture(scope="module")
def slurm_here(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[slurm.Cluster]:
    if missing := slurm.why_not():
        pytest.skip(missing)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        request.config.stash[VERSIONS]["Slurm"] = cluster.run("srun", "--version").stdout.strip()
        yield cluster


@pytest.fixture
def cluster(slurm_here: slurm.Cluster) -> Iterator[slurm.Cluster]:
    """The cluster; afterwards no process, no file in /dev/shm and no job may be left."""
    yield slurm_here
    try:
        hosts.wait_until(lambda: not slurm_here.left_behind(), 10)
    except AssertionError:
        pytest.fail(f"left behind: {slurm_here.left_behind()}", pytrace=False)


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_on_one_host(cluster: slurm.Cluster, mpi: str) -> None:
    done = cluster.run("srun", f"--mpi={mpi}", "-N1", "-n4", *RUN)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums("host0", "host0", "host0", "host0")
    assert "srun" not in done.stderr
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize("layout", ["block", "cyclic"])
def test_srun_on_two_hosts(cluster: slurm.Cluster, layout: str) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", "-m", layout, *RUN)
    assert done.returncode == 0, done.stderr
    a, b = "host0", "host1"
    assert lines(done.stdout) == sums(*([a, a, b, b] if layout == "block" else [a, b, a, b]))
    assert done.stderr.count("this job has no token") == 1


def test_two_hosts_with_a_token(cluster: slurm.Cluster) -> None:
    done = cluster.run("srun", "-N2", "-n2", *RUN, UNISONO_TOKEN="ab" * 32)
    assert done.returncode == 0, done.stderr
    assert "token" not in done.stderr


def test_two_steps_of_one_job_at_once(cluster: slurm.Cluster, tmp_path: Path) -> None:
    step = f"srun --exact -N1 -n2 {' '.join(RUN)} &\n"
    script = batch(tmp_path, f"{step}{step}wait\n", "-N1", "-n4")
    done = cluster.run("sbatch", "-W", "-o", str(tmp_path / "out"), script)
    text = (tmp_path / "out").read_text()
    assert done.returncode == 0, text
    assert lines(text) == sorted(sums("host0", "host0") * 2), text


def batch(folder: Path, commands: str, *flags: str) -> str:
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {flag}\n" for flag in flags) + commands)
    return str(script)


def test_sbatch(cluster: slurm.Cluster, tmp_path: Path) -> None:
    script = batch(tmp_path, f"srun {' '.join(RUN)}\n", "--nodes=2", "--ntasks-per-node=2")
    done = cluster.run("sbatch", "-W", "-o", str(tmp_path / "out"), script)
    text = (tmp_path / "out").read_text()
    assert done.returncode == 0, text
    assert lines(text) == sums("host0", "host0", "host1", "host1")


def test_a_batch_script_without_srun_is_told(cluster: slurm.Cluster, tmp_path: Path) -> None:
    script = batch(tmp_path, f"{' '.join(RUN)}\n", "-N1", "-n2")
    done = cluster.run("sbatch", "-W", "-o", str(tmp_path / "out"), script)
    assert done.returncode == 1
    assert "Start the ranks with srun: srun python script.py." in (tmp_path / "out").read_text()


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_task_that_is_killed_is_named_by_the_others(cluster: slurm.Cluster, nodes: str) -> None:
    start = time.monotonic()
    done = cluster.run("srun", f"-N{nodes}", "-n4", *RUN, "dies")
    assert done.returncode != 0
    assert time.monotonic() - start < 40
    assert re.search(r"PeerLost: all_reduce failed: rank 1 \(.*pid \d+\) died", done.stderr), done.stderr
    assert re.search(r"srun: error: host0: task 1: Killed", done.stderr), done.stderr


def test_an_error_of_one_task_is_named_by_the_others(cluster: slurm.Cluster) -> None:
    done = cluster.run("srun", "-N2", "-n4", *RUN, "fails")
    assert done.returncode == 1
    assert "ValueError: label 10 is out of range" in done.stderr
    assert "rank 1" in done.stderr
    assert "PeerLost" in done.stderr


def test_scancel(cluster: slurm.Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = batch(tmp_path, f"srun {' '.join(RUN)} long\n", "-N2", "-n4")
    job = cluster.run("sbatch", "--parsable", "-o", str(out), script).stdout.strip()
    hosts.wait_until(lambda: out.exists() and len(lines(out.read_text())) == 4, 60)
    assert cluster.run("scancel", job).returncode == 0
    hosts.wait_until(lambda: not cluster.run("squeue", "-h").stdout and not cluster.steps(), 30)
    assert re.search(r"JOB \d+ ON host0 CANCELLED", out.read_text()), out.read_text()


def test_a_time_limit(cluster: slurm.Cluster) -> None:
    """Slurm looks for jobs over their limit twice a minute; the limit's unit is a minute."""
    done = cluster.run("srun", "-N2", "-n2", "-t", "00:00:01", *RUN, "long", timeout=170)
    assert done.returncode != 0
    assert re.search(r"CANCELLED.* DUE TO TIME LIMIT", done.stderr), done.stderr
