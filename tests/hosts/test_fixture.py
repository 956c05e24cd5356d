"""The hosts themselves: they reach one another, links have the rate asked for, nothing stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hosts
from effort import HANG_S

pytestmark = pytest.mark.hosts

MAKES_HOSTS = str(Path(__file__).resolve().parent / "programs" / "makes_hosts.py")
STREAM = str(Path(__file__).with_name("stream_program.py"))


def stream(net: hosts.Network, address: str, nbytes: int) -> float:
    """Send from host 1 to host 0; seconds."""
    listener = net[0].start([sys.executable, STREAM, "listen", address, str(nbytes)])
    assert listener.stdout is not None
    assert listener.stdout.readline() == "ready\n", listener.communicate()
    sent = net[1].run([sys.executable, STREAM, "send", address, str(nbytes)])
    out, errors = listener.communicate(timeout=HANG_S)
    assert sent.returncode == 0 and int(out) > 0, (sent.stderr, errors)
    return float(sent.stdout)


def test_links_carry_are_shaped_cut_and_counted():
    with hosts.hosts(2) as net:
        assert net[0].must("hostname") == "host0\n"
        assert net[1].must("sh", "-c", "ls /dev/shm | wc -l") == "0\n"
        before = net[1].traffic()
        stream(net, net[0].address, 8 << 20)
        assert 8 << 20 <= net[1].traffic().sent - before.sent < 9 << 20
        stream(net, net[0].address6, 1 << 20)
        net.shape("100mbit")
        assert stream(net, net[0].address, 5 << 20) > 0.9 * (5 << 20) * 8 / 100e6
        net.shape("")
        net[1].cut()
        knock = f"import socket; socket.create_connection(('{net[0].address}', 9), timeout=0.5)"
        assert "imed out" in net[1].run([sys.executable, "-c", knock]).stderr
        net[1].mend()
        net.wait_until_up()


def test_delay_and_loss_are_real():
    with hosts.hosts(2) as net:
        net.disturb(delay_s=0.05, loss=0.05)
        took = stream(net, net[0].address, 300_000)
        assert took > 0.1
        net[1].must(
            sys.executable, "-c", f"import socket; socket.socket().connect_ex(('{net[0].address}', 9))"
        )
        counters = net[1].must("sh", "-c", "grep ^Tcp: /proc/net/snmp").splitlines()
        named = dict(zip(counters[0].split(), counters[1].split(), strict=True))
        assert int(named["RetransSegs"]) > 0


def test_a_crash_leaves_nothing():
    environ = {**os.environ, "PYTHONPATH": os.path.dirname(hosts.__file__)}
    process = subprocess.Popen([sys.executable, MAKES_HOSTS], stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
