"""Ray starts the ranks: `unisono.ray.run` and `join`, Ray Train, on one host and on two."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import hosts
from started import MORTAL, VERSIONS, end_with, name_hosts

PROGRAM = str(Path(__file__).with_name("ray_program.py"))
LIMIT_S = 400.0  # Ray starts in 10 s; on a busy machine it took 120 s

pytestmark = [
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not here: pip install 'ray[train]'"),
]


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[dict[str, str]]:
    """The environment for Ray, which keeps a token in the home; a short path, for Ray puts sockets below."""
    with tempfile.TemporaryDirectory(prefix="u", dir="/tmp") as folder:
        quiet = {"RAY_SCHEDULER_EVENTS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        yield {**os.environ, "HOME": folder, **quiet}


@pytest.fixture(autouse=True)
def ray_version(request: pytest.FixtureRequest) -> None:
    request.config.stash[VERSIONS]["Ray"] = version("ray")


def said(case: str, home: dict[str, str]) -> str:
    """What the program prints; it starts Ray with four processors and ends it."""
    command = [sys.executable, PROGRAM, case]
    done = subprocess.run(
        command, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_run(home: dict[str, str]) -> None:
    said_ = said("run", home)
    assert "[(0, 20.0), (1, 20.0), (2, 20.0), (3, 20.0)] 4 processes" in said_
    assert "free again: True" in said_


def test_an_actor_that_dies_is_named_by_the_others_and_by_the_driver(home: dict[str, str]) -> None:
    text = said("dies", home)
    assert re.search(r"driver: PeerLost, rank 2: the Ray actor of rank 2 \(host \S+, pid \d+\) died", text), (
        text
    )
    for rank in (0, 1, 3):
        assert re.search(rf"rank {rank} saw: all_reduce failed: rank 2 \(pid \d+\) died", text), text
    assert "free again: True" in text


def test_an_error_of_a_rank_comes_to_the_driver(home: dict[str, str]) -> None:
    text = said("fails", home)
    assert "ValueError: label 10 is out of range" in text
    if sys.version_info >= (3, 11):
        assert re.search(r"raised on rank 1 \(host \S+, pid \d+\) of unisono.ray.run", text)


def test_actors_form_a_group_and_use_a_ring(home: dict[str, str]) -> None:
    text = said("actors", home)
    assert text.count("{((3, 4), 10.0, 10.0)}") == 3
    assert len(re.findall(r"rank 3 lost: barrier failed: rank 3 \(pid \d+\) died", text)) == 3, text


def test_an_actor_that_never_comes_is_named(home: dict[str, str]) -> None:
    assert "missing (0,)" in said("missing", home)


def test_resources_and_placement_groups_are_respected(home: dict[str, str]) -> None:
    text = said("resources", home)
    assert "Ray found no room for 9 workers of {'CPU': 1} within 2 s: the cluster has {'CPU': 4.0}" in text
    assert "the placement group is CREATED" in text
    assert "ValueError: placement_group has 2 bundles, expected one for each of 3 workers" in text
    assert "RendezvousError: Ray found no room for 2 workers of {'CPU': 1, 'GPU': 1}" in text


def test_ray_train(home: dict[str, str]) -> None:
    for name in ("torch", "pandas", "pyarrow"):  # not imported here: their threads would stay
        if find_spec(name) is None:
            pytest.skip(f"Ray Train is not here ({name} is missing): pip install 'ray[train]' torch")
    done = subprocess.run(
        [sys.executable, PROGRAM, "trainer"], env=home, capture_output=True, text=True, timeout=LIMIT_S
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert text.count("backend unisono sum 3.0") >= 2


def bring_up(
    stack: contextlib.ExitStack,
    node: hosts.Host,
    command: list[str],
    home: dict[str, str],
    nodes: list[str],
    seen: str,
) -> None:
    """Start Ray on a host until `nodes` prints `seen`; again where Ray ends by itself, see ray_program.py."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    end = time.monotonic() + LIMIT_S
    while True:
        process = node.start(command, env=home, **quiet)
        end_with(stack, process)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(nodes, env=home, capture_output=True, text=True, timeout=100)
                if seen in done.stdout:
                    return
            assert time.monotonic() < end, "Ray does not start"
        assert time.monotonic() < end, "Ray ends at its start"
        node.kill()


@pytest.mark.hosts
def test_two_hosts(home: dict[str, str], tmp_path: Path) -> None:
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    assert ray
    with tempfile.TemporaryDirectory(prefix="u", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        net = stack.enter_context(hosts.hosts(2))
        name_hosts(net, tmp_path)
        address = f"{net[0].address}:6379"
        nodes = net[0].command([sys.executable, PROGRAM, "nodes", address])
        for node in net:
            node.must("mount", "-t", "tmpfs", "tmpfs", folder)
            own = ["--num-cpus=2", f"--node-ip-address={node.address}", "--object-store-memory=80000000"]
            head = ["--head", "--port=6379", f"--temp-dir={folder}", "--include-dashboard=false"]
            role = head if node is net[0] else [f"--address={address}"]
            seen = f"{node.number + 1} nodes"  # a host that is started before the first one is up gives up
            bring_up(stack, node, [*MORTAL, ray, "start", "--block", *role, *own], home, nodes, seen)
        done = net[0].run([sys.executable, PROGRAM, "hosts", address], env=home, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        text = done.stdout
    assert sorted(re.findall(r"rank \d on (host\d): 4", text)) == ["host0"] * 2 + ["host1"] * 2, text
