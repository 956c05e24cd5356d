"""Groups whose ranks are on several hosts: results, addresses, and what happens when a cable is pulled."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
import suite
from effort import HANG_S, cases, times
from loops import each

pytestmark = pytest.mark.hosts

PROGRAM = str(Path(__file__).with_name("group_program.py"))
TORCH_PROGRAM = str(Path(__file__).with_name("torch_program.py"))
PLANS_PROGRAM = str(Path(__file__).resolve().parents[1] / "torch" / "programs" / "plans.py")
SHRINKS_PROGRAM = str(Path(PLANS_PROGRAM).with_name("shrinks.py"))
TESTS = Path(__file__).resolve().parents[1]
PLACES = os.pathsep.join([str(TESTS / "support"), str(TESTS / "torch")])
Ranks = list["subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def net() -> Iterator[hosts.Network]:
    with hosts.hosts(4) as network:
        yield network


@pytest.fixture
def own_net() -> Iterator[hosts.Network]:
    """Two hosts whose cables the test may pull."""
    with hosts.hosts(2) as network:
        yield network


def start(
    net: hosts.Network, layout: tuple[int, ...], what: str, *, program: str = PROGRAM, **variables: str
) -> Ranks:
    """Start the program on `layout[i]` ranks of host i."""
    command = [sys.executable, program, what]
    return [
        host.start(command, env={**os.environ, **environ, **variables}, stdin=subprocess.PIPE)
        for host, environ in placed(net, layout)
    ]


def placed(net: hosts.Network, layout: tuple[int, ...]) -> list[tuple[hosts.Host, dict[str, str]]]:
    """The host and the environment of each rank."""
    found: list[tuple[hosts.Host, dict[str, str]]] = []
    for host, count in enumerate(layout):
        for local in range(count):
            environ = {
                "PYTHONPATH": PLACES,
                "RANK": str(len(found)),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(sum(layout)),
                "MASTER_ADDR": net[0].address,
                "MASTER_PORT": "29500",
                "UNISONO_TOKEN": "5" * 64,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            found.append((net[host], environ))
    return found


def ended(ranks: Ranks, timeout: float = HANG_S) -> list[tuple[int, str, str]]:
    """Per rank, how it ended and what it printed."""
    found = []
    for rank in ranks:
        try:
            out, errors = rank.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            rank.kill()
            out, errors = rank.communicate()
        found.append((rank.returncode, out, errors))
    return found


def fine(ranks: Ranks) -> list[str]:
    """What the ranks printed, all of which ended well."""
    results = ended(ranks)
    assert [code for code, _, _ in results] == [0] * len(ranks), results
    return [out for _, out, _ in results]


# ---- results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", cases([(1, 1, 1, 1)], long=[(2, 1), (2, 2), (3, 2, 1)]), ids=str)
def test_every_operation(net: hosts.Network, layout: tuple[int, ...]):
    assert fine(start(net, layout, "conformance")) == [f"hosts {len(layout)}\n"] * sum(layout)


def forked(
    forks: suite.Forks, folder: Path, net: hosts.Network, layout: tuple[int, ...], *words: str, dead: int = 0
) -> str:
    """Run a program of PyTorch on `layout[i]` ranks of host i; what they printed.

    dead: how many are killed. All others end well.
    """
    places = json.dumps([(host.pid, environ) for host, environ in placed(net, layout)])
    printed = forks.run(folder, {"ranks": ("on_hosts", sum(layout), [places, *words])})["ranks"]
    assert sum("(ended with" in text for text in printed) == dead, "\n".join(printed)
    return "".join(printed)


@pytest.mark.torch
def test_pytorch_trains_as_one_process_does(net: hosts.Network, forks: suite.Forks, tmp_path: Path):
    printed = forked(forks, tmp_path, net, (1, 1), TORCH_PROGRAM, "2")
    assert printed.splitlines().count("fine") == 2


@pytest.mark.torch
def test_parallel_plans_train_as_one_process_does(net: hosts.Network, forks: suite.Forks, tmp_path: Path):
    printed = forked(forks, tmp_path, net, (2, 2), PLANS_PROGRAM, "unisono")
    assert printed.count("Plan(") == 10


@pytest.mark.torch
@pytest.mark.parametrize(  # test_shrink_group.py has all on one host
    ("way", "dead"),
    cases([("by_will", 0), ("killed", 2)], long=[("destroyed_first", 0), ("disagree", 0), ("subgroup", 0)]),
)
def test_shrink_group(net: hosts.Network, forks: suite.Forks, tmp_path: Path, way: str, dead: int):
    printed = forked(forks, tmp_path, net, (2, 2), SHRINKS_PROGRAM, way, dead=dead)
    assert printed.splitlines().count("fine") == 4 - dead


@each("way", ["MASTER_ADDR", "INIT_METHOD"])
def test_where_there_is_only_ipv6(own_net: hosts.Network, way: str):
    for node in own_net:
        node.must("ip", "-4", "addr", "flush", "dev", hosts.INTERFACE)
    master = own_net[0].address6
    place = master if way == "MASTER_ADDR" else f"tcp://[{master}]:29500"
    assert fine(start(own_net, (2, 1), "exact", **{way: place})) == ["exact\n"] * 3


def test_delay_and_loss_change_no_bit(own_net: hosts.Network):
    own_net.disturb(delay_s=0.02, loss=0.01)
    assert fine(start(own_net, (1, 1), "exact")) == ["exact\n"] * 2


def test_no_more_crosses_a_link_than_must(net: hosts.Network):
    """Two ranks on each of two hosts: 2 (h - 1) / h of the bytes, with h hosts, leave each of them."""
    ranks = start(net, (2, 2), "bytes_of_all_reduce")

    def all_say(word: str) -> None:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            assert line == f"{word}\n", (line, rank.stderr and rank.stderr.read())

    def go_on() -> None:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()

    all_say("begin")
    before = [net[host].traffic() for host in (0, 1)]
    go_on()
    all_say("end")
    after = [net[host].traffic() for host in (0, 1)]
    go_on()
    fine(ranks)
    least = 4 * (16 << 20)
    for one, other in zip(before, after, strict=True):
        assert least <= other.sent - one.sent < 1.03 * least, (before, after)


# ---- TLS -----------------------------------------------------------------------------------------------

WIRETAP = str(Path(__file__).resolve().parent / "programs" / "listens_on_the_wire.py")
ENOUGH = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'that is all', ('{}', 9))"


@pytest.mark.parametrize(("tls", "wiretap"), [("0", "read it\n"), ("1", "saw nothing\n")])
def test_tls_hides_data_from_a_listener(net: hosts.Network, tls: str, wiretap: str):
    tap = net.switch.start([sys.executable, WIRETAP])
    assert tap.stdout is not None
    assert tap.stdout.readline() == "ready\n"
    assert fine(start(net, (1, 2), "secret", UNISONO_TLS=tls)) == ["told\n"] * 3

    def over() -> bool:  # a packet that comes while the tap is busy may be lost
        net[0].must(sys.executable, "-c", ENOUGH.format(net[1].address))
        return tap.poll() is not None

    hosts.wait_until(over)
    assert tap.communicate()[0] == wiretap


def test_every_operation_over_tls(net: hosts.Network):
    assert fine(start(net, (2, 1), "conformance", UNISONO_TLS="1")) == ["hosts 2\n"] * 3
    hosts.wait_until(lambda: not net[0].processes() + net[1].processes())


def test_a_rank_that_dies_behind_tls_is_named(net: hosts.Network):
    ranks = start(net, (1, 1), "loop", UNISONO_TLS="1")
    up(ranks)
    ranks[1].kill()
    _, text = error_of(ended(ranks)[0])
    assert text.startswith("PeerLost")
    assert "rank 1 (host host1" in text
    hosts.wait_until(lambda: not net[0].processes() + net[1].processes())


def relays_of(host: hosts.Host) -> list[int]:
    """The processes that encrypt the connections of this host's ranks."""
    runs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.processes()}
    return [pid for pid, command in runs.items() if b"bootstrap.tls_relay import main" in command]


@pytest.mark.parametrize(("layout", "at"), cases([((1, 1), 0), ((2, 1), 1)], long=[((1, 1), 1)]), ids=str)
def test_a_relay_that_is_killed_is_no_death_of_its_rank(net: hosts.Network, layout: tuple[int, ...], at: int):
    ranks = start(net, layout, "loop", UNISONO_TLS="1")
    up(ranks)
    for pid in relays_of(net[at]):
        os.kill(pid, signal.SIGKILL)
    for result in ended(ranks):
        _, text = error_of(result)
        assert text.startswith("PeerLost"), text
        assert "is lost: its connection over TLS has ended" in text
        assert "unisono.engine.bootstrap.tls_relay" in text
        assert "died" not in text


# ---- addresses -----------------------------------------------------------------------------------------


def test_ports_of_a_range_and_an_interface_by_name(net: hosts.Network):
    ranks = start(
        net, (2, 1), "exact", UNISONO_SOCKET_IFNAME="=eth0", UNISONO_PORT_RANGE="21000-21009"
    )  # three ranks; a firewall opens ten ports
    assert fine(ranks) == ["exact\n"] * 3


def test_loopback_is_refused(net: hosts.Network):
    for code, _, errors in ended(start(net, (1, 1), "exact", UNISONO_SOCKET_IFNAME="lo")):
        assert code == 1
        assert "can only be reached at 127.0.0.1, which no other host can use" in errors
        assert "UNISONO_SOCKET_IFNAME" in errors


def test_two_that_cannot_reach_each_other_are_named_by_all(net: hosts.Network):
    """Hosts 1 and 2 both reach host 0, but not each other."""
    one, two = net[1], net[2]
    one.must("ip", "route", "add", "prohibit", two.address)
    two.must("ip", "route", "add", "prohibit", one.address)
    try:
        results = ended(start(net, (1, 1, 1), "exact"))
    finally:
        one.must("ip", "route", "del", "prohibit", two.address)
        two.must("ip", "route", "del", "prohibit", one.address)
    assert [code for code, _, _ in results] == [1, 1, 1]
    for _, _, errors in results:
        last = errors.rstrip().splitlines()[-1]
        assert f"rank 1 (host host1) cannot reach rank 2 (host host2) at {two.address}:" in last, errors


def test_packets_that_vanish_name_both_ends_and_the_interface(net: hosts.Network):
    """Nothing refuses: what host 2 answers host 1 is dropped. All say so before their own time is up."""
    one, two = net[1], net[2]
    two.must("ip", "route", "add", "blackhole", one.address)
    try:
        results = ended(start(net, (1, 1, 1), "exact", LIMIT_S="6"))
    finally:
        two.must("ip", "route", "del", "blackhole", one.address)
    assert [code for code, _, _ in results] == [1, 1, 1]
    for _, _, errors in results:
        last = errors.rstrip().splitlines()[-1]
        assert f"rank 1 (host host1) cannot reach rank 2 (host host2) at {two.address}:" in last, errors
        assert f"through eth0 ({one.address}): timed out" in last, errors


# ---- cables --------------------------------------------------------------------------------------------


def up(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"


def error_of(result: tuple[int, str, str]) -> tuple[float, str]:
    """When the rank raised, and what."""
    line = next(line for line in result[1].splitlines() if line.startswith("error "))
    _, at, text = line.split(" ", 2)
    return float(at), text


def moments_after(rank: "subprocess.Popen[str]", moment: float) -> list[float]:
    """When the rank said that it went on, up to the first time after this moment."""
    assert rank.stdout is not None
    found = []
    for line in rank.stdout:
        assert line.startswith("at "), line
        found.append(float(line.split()[1]))
        if found[-1] > moment:
            break
    return found


def test_a_link_that_is_down_for_seconds_is_waited_for(own_net: hosts.Network):
    ranks = start(own_net, (1, 1), "loop")
    up(ranks)
    own_net[1].cut()
    cut, down_s = time.time(), times(usual=3, long=5)
    time.sleep(down_s)
    own_net[1].mend()
    moments = moments_after(ranks[0], cut + down_s)
    own_net[1].kill()
    ended(ranks)
    assert not any(cut + 1.5 < moment < cut + down_s - 0.1 for moment in moments)
    assert moments[-1] > cut + down_s, moments


def test_a_link_that_stays_down_is_an_error_that_names_the_peer(own_net: hosts.Network):
    ranks = start(own_net, (1, 1), "loop", UNISONO_PEER_TIMEOUT_S="1.5")
    up(ranks)
    own_net[1].cut()
    cut = time.time()
    for rank, result in enumerate(ended(ranks)):
        at, text = error_of(result)
        assert text.startswith("PeerLost"), result
        assert f"rank {1 - rank} (host host{1 - rank}" in text
        assert "its host no longer answers" in text
        assert "died" not in text
        assert 0.7 < at - cut < 13, (at - cut, text)


@pytest.mark.parametrize("tls", ["0", "1"])
def test_a_host_that_is_killed_behind_a_cut_link_is_named(own_net: hosts.Network, tls: str):
    """No packet says that it died. With TLS, the process beside the survivor ends, too."""
    ranks = start(own_net, (1, 1), "loop", UNISONO_PEER_TIMEOUT_S="1", UNISONO_TLS=tls)
    up(ranks)
    own_net[1].cut()
    own_net[1].kill()
    killed = time.time()
    at, text = error_of(ended(ranks)[0])
    assert text.startswith("PeerLost"), text
    assert "rank 1 (host host1" in text
    assert at - killed < 10, (at - killed, text)  # found: 1.3 s
    hosts.wait_until(lambda: not own_net[0].processes())


@pytest.mark.parametrize("layout", cases([(2, 2)], long=[(2, 1), (1, 2)]), ids=str)
def test_a_host_that_is_killed_is_named_at_once(own_net: hosts.Network, layout: tuple[int, ...]):
    ranks = start(own_net, layout, "loop")
    up(ranks)
    killed = time.time()
    own_net[1].kill()
    for result in ended(ranks)[: layout[0]]:
        at, text = error_of(result)
        assert "PeerLost" in text
        assert re.search(r"rank [123] \(host host1", text), text
        assert at - killed < 10, (at - killed, text)  # promised is 1 s, on a machine that is not crowded
