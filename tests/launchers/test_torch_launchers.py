"""PyTorch's launchers start the ranks: torchrun, on one host and on two, distributed.launch, mp.spawn."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import hosts
from ports import reserved
from started import PROGRAM, VERSIONS, lines, name_hosts, sums

torch = pytest.importorskip("torch", reason="PyTorch is not here: pip install torch")
TORCH_PROGRAM = str(Path(__file__).with_name("torch_rank_program.py"))
HERE = os.uname().nodename
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--use-env"]


@pytest.fixture(autouse=True)
def torch_version(request: pytest.FixtureRequest) -> None:
    request.config.stash[VERSIONS]["torchrun, torch.distributed.launch, mp.spawn"] = (
        f"PyTorch {version('torch')}"
    )


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def port() -> Iterator[str]:
    with reserved() as number:
        yield str(number)


def rendezvous(kind: str, port: str, address: str = "127.0.0.1") -> list[str]:
    """torchrun's flags for its static rendezvous, and for the one with a server of its own."""
    if kind == "static":
        return [f"--master-addr={address}", f"--master-port={port}"]
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", "--rdzv-id=17"]


@pytest.mark.parametrize("program", [PROGRAM, TORCH_PROGRAM], ids=["unisono", "torch.distributed"])
@pytest.mark.parametrize("kind", ["static", "c10d", "standalone"])
def test_torchrun(kind: str, program: str, port: str) -> None:
    flags = ["--standalone"] if kind == "standalone" else rendezvous(kind, port)
    done = ended(*TORCHRUN, "--nproc-per-node=2", *flags, program)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums(HERE, HERE)


def test_torch_distributed_launch(port: str) -> None:
    done = ended(*LAUNCH, "--nproc-per-node=2", f"--master-port={port}", TORCH_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums(HERE, HERE)


def test_spawn(port: str) -> None:
    done = ended(sys.executable, TORCH_PROGRAM, "--spawn", port)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == sums(HERE, HERE)


def test_a_rank_that_is_killed_is_named(port: str) -> None:
    done = ended(*TORCHRUN, "--nproc-per-node=3", *rendezvous("c10d", port), TORCH_PROGRAM, "dies")
    assert done.returncode == 1
    assert re.search(r"failed: rank 1 \(pid \d+\) died", done.stderr), done.stderr
    assert "exitcode  : -9" in done.stderr


def test_a_spawned_rank_that_is_killed_is_named(port: str) -> None:
    done = ended(sys.executable, TORCH_PROGRAM, "dies", "--spawn", port)
    assert done.returncode == 1
    assert re.search(r"process 1 terminated with signal SIGKILL|rank 1 \(pid \d+\) died", done.stderr), (
        done.stderr
    )


@pytest.mark.hosts
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_two_hosts(kind: str, tmp_path: Path) -> None:
    with hosts.hosts(2) as net:
        name_hosts(net, tmp_path)
        flags = ["--nnodes=2", "--nproc-per-node=2", *rendezvous(kind, "29500", net[0].address)]
        environ = {**os.environ, "UNISONO_TOKEN": "ab" * 32}
        started = []
        for node in net:
            own = [f"--node-rank={node.number}", f"--local-addr={node.address}"]
            own += [f"--rdzv-conf=is_host={node.number == 0}"] if kind == "c10d" else []
            started.append(node.start([*TORCHRUN, *flags, *own, PROGRAM], env=environ))
        results = [(*each.communicate(timeout=100), each.returncode) for each in started]
    assert [code for _, _, code in results] == [0, 0], results
    seen = lines("".join(out for out, _, _ in results))
    assert sorted(line.split(" on ")[1] for line in seen) == ["host0: 10"] * 2 + ["host1: 10"] * 2
    assert [line.split(" on ")[0] for line in seen] == [f"rank {rank} of 4" for rank in range(4)]
