"""`unisono run --elastic` on two hosts: one ends, also that of the store and rank 0, and a launcher joins."""

import os
from pathlib import Path

import pytest

import hosts
from node_launchers import NodeLauncher, elastic_flags

pytestmark = pytest.mark.hosts

ENDLESS = 1_000_000
PROGRAM = str(Path(__file__).resolve().parents[1] / "multiproc" / "programs" / "goes_on.py")


def started(host: hosts.Node, token: Path, steps: int, *flags: str) -> NodeLauncher:
    environ = {"PAUSE_S": "0.02", "STOP": f"{token}-stop"}
    return NodeLauncher(host, token, [PROGRAM, str(steps), "nothing", "9", "0"], *flags, **environ)


def both(net: hosts.Network, token: Path, steps: int, *flags: str) -> list[NodeLauncher]:
    where = elastic_flags(net, 6)
    made = [started(net[0], token, steps, *where, "--node-rank", "0", *flags)]
    hosts.wait_until(token.exists)
    return [*made, started(net[1], token, steps, *where, "--node-rank", "1", *flags)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_ends_and_the_other_one_finishes(net: hosts.Network, tmp_path: Path, number: int) -> None:
    nodes = both(net, tmp_path / "token", ENDLESS)
    nodes[0].await_line("size 4")
    net[number].kill()
    nodes[1 - number].await_line("generation [1-9] size 2")
    (tmp_path / "token-stop").touch()
    assert nodes[1 - number].end() == 0, nodes[1 - number].output
    assert nodes[1 - number].output.count(f"done {ENDLESS} size 2") == 2, nodes[1 - number].output
    nodes[number].end()


def test_the_host_of_the_store_leaves_and_another_launcher_joins(net: hosts.Network, tmp_path: Path) -> None:
    token = tmp_path / "token"
    nodes = both(net, token, ENDLESS)
    nodes[1].await_line("size 4")
    nodes[0].process.send_signal(2)
    assert nodes[0].end() == 130, nodes[0].output
    nodes[1].await_line("generation [1-9] size 2")
    address = nodes[1].await_line(rf"--join (?:[^ ]*,)?({net[1].address}:\d+)")
    newcomers = started(net[0], token, ENDLESS, "--join", address)
    newcomers.await_line("size 4")
    (tmp_path / "token-stop").touch()
    assert newcomers.end() == 0, newcomers.output
    assert nodes[1].end() == 0, nodes[1].output
    assert newcomers.output.count(f"done {ENDLESS} size 4") == 2, newcomers.output
    assert nodes[1].output.count(f"done {ENDLESS} size 4") == 2, nodes[1].output


def test_both_hosts_finish(net: hosts.Network, tmp_path: Path) -> None:
    nodes = both(net, tmp_path / "token", 30, "--respawn", "2")
    assert [node.end() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert all(node.output.count("done 30 size 4") == 2 for node in nodes)


def test_a_rank_of_each_host_is_replaced_there(net: hosts.Network, tmp_path: Path) -> None:
    nodes = both(net, tmp_path / "token", ENDLESS, "--respawn", "3")
    for node in nodes:
        node.await_line("size 4")
    ranks = [pid for host in net for pid in host.processes() if _runs(pid)]
    for pid in (ranks[0], ranks[-1]):
        os.kill(pid, 9)
    for node in nodes:
        node.await_line(r"generation [2-9] size 4")
    (tmp_path / "token-stop").touch()
    assert [node.end() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert all(node.output.count(f"done {ENDLESS} size 4") == 2 for node in nodes), (
        nodes[0].output + nodes[1].output
    )


def _runs(pid: int) -> bool:
    """Whether it is a rank: it runs the program itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return len(words) > 1 and words[1] == PROGRAM.encode()
