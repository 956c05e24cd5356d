"""Groups on two hosts that lose a rank, a host, or the link between them, in both directions or in one."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hosts
from effort import HANG_S, cases

pytestmark = pytest.mark.hosts

PROGRAM = str(Path(__file__).resolve().parents[1] / "multiproc" / "survivor_program.py")
Ranks = list["subprocess.Popen[str]"]


def run(net: hosts.Network, per_host: int, strike: Callable[[Ranks], object]) -> list[dict[str, Any]]:
    """What each rank has reported; {} for one that has died."""
    size = 2 * per_host
    place = [f"WORLD_SIZE={size}", f"MASTER_ADDR={net[0].address}", "MASTER_PORT=29500", "MEETING=env://"]
    place.append("UNISONO_PEER_TIMEOUT_S=4")
    running = [
        net[rank // per_host].start(
            ["env", f"RANK={rank}", *place, sys.executable, "-W", "ignore", PROGRAM, "outside", "", "1"],
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        for each in running:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        time.sleep(0.2)
        strike(running)
        found = []
        for each in running:
            output = each.communicate(timeout=HANG_S)[0]
            facts: dict[str, Any] = {"output": output}
            for line in output.splitlines():
                if line.startswith("{"):
                    facts.update(json.loads(line))
            found.append(facts)
        return found
    finally:
        for each in running:
            each.kill()
            each.communicate()


def goes_on(found: list[dict[str, Any]], living: list[int]) -> None:
    """The living ranks are in one group; those that are not, and run, are evicted."""
    for number, rank in enumerate(living):
        assert found[rank].get("size") == len(living), found[rank]["output"]
        assert (found[rank]["new_rank"], found[rank]["generation"]) == (number, 1)
        assert sorted(map(int, found[rank]["left"])) == sorted(set(range(len(found))) - set(living))


@pytest.mark.parametrize(("per_host", "victim"), cases([(2, 0), (1, 1)], long=[(2, 3), (1, 0)]))
def test_a_rank_is_killed(net: hosts.Network, per_host: int, victim: int) -> None:
    found = run(net, per_host, lambda running: running[victim].kill())
    goes_on(found, [rank for rank in range(2 * per_host) if rank != victim])


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_ends_also_that_of_rank_0_and_the_store(net: hosts.Network, number: int) -> None:
    found = run(net, 2, lambda running: net[number].kill())
    goes_on(found, [2, 3] if number == 0 else [0, 1])


def test_the_link_is_cut_and_one_side_goes_on(net: hosts.Network) -> None:
    found = run(net, 2, lambda running: net[1].cut())
    goes_on(found, [0, 1])
    for rank in (2, 3):
        assert "neither more than half" in found[rank].get("evicted", ""), found[rank]["output"]


@pytest.mark.parametrize("deaf", [0, 1])
def test_the_link_is_cut_in_one_direction(net: hosts.Network, deaf: int) -> None:
    """Packets of one host go to a machine that does not exist."""
    other = net[1 - deaf]

    def strike(running: Ranks) -> None:
        other.must(
            "ip", "neigh", "replace", net[deaf].address, "lladdr", "02:00:00:00:00:99", "nud", "permanent",
            "dev", hosts.INTERFACE,
        )  # fmt: skip

    found = run(net, 2, strike)
    goes_on(found, [0, 1])
    for rank in (2, 3):
        assert found[rank].get("evicted"), found[rank]["output"]
