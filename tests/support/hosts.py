"""Hosts for tests: network namespaces on one bridge, with links that can be shaped, cut, delayed and counted.

    with hosts(2) as net:                      # needs root; `why_not()` says what is missing
        net[0].run(["python", "x.py"])         # its own network, host name and /dev/shm
        net.shape("1gbit"); net[1].cut(); net[1].mend(); net[0].traffic()

No global names are used: each host is a process that sleeps in namespaces of its own, and the bridge is in
another one. All of them get SIGKILL from the kernel when this process dies. The kernel removes a namespace
and its interfaces with its last process: so any number of runs can share a machine, and a crash leaves
nothing behind.

    host 0 [eth0 10.77.0.1, fd77::1] -- p0 \
    host 1 [eth0 10.77.0.2, fd77::2] -- p1 -- bridge, or `lossy.py` between two ports
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from effort import HANG_S
from launching import wait_until as wait_until  # tests wait for hosts by it, too

HERE = Path(__file__).resolve().parent
INTERFACE = "eth0"
SWITCH = "switch"
READY_S = HANG_S
# Between a namespace's first process and its readers: what each host has to itself.
_OWN = ["unshare", "--net", "--uts", "--mount", "--ipc"]
_PREPARE = (
    "hostname {name} && ip link set lo up && mount -t tmpfs -o size=256m tmpfs /dev/shm"
    " && echo ready && exec sleep infinity"
)


class Traffic(NamedTuple):
    """Bytes through an interface by its own counters, including headers."""

    received: int
    sent: int


def why_not() -> str:
    """The reason why this machine cannot make hosts; empty when it can."""
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    try:
        done = subprocess.run(
            [*_OWN, "sh", "-c", "ip link add one0 type veth peer name two0 && ip link add sw0 type bridge"],
            capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot make network namespaces: {error}"
    return "" if done.returncode == 0 else f"cannot make network namespaces: {done.stderr.strip()}"


class Host:
    """One namespace of network, host name, mounts and System V memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = self.address6 = ""
        holder = ["setpriv", "--pdeathsig", "KILL", *_OWN, "sh", "-c", _PREPARE.format(name=name)]
        self._process = subprocess.Popen(holder, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.remove()
            raise RuntimeError(f"host {name} could not be made")

    @property
    def pid(self) -> int:
        """The process that keeps the namespaces alive."""
        return self._process.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-i", f"--wdns={os.getcwd()}"]
        path = f"PATH={os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where bridge and tc are
        return [*enter, "env", path, *argv]

    def run(self, argv: Sequence[str], *, timeout: float = HANG_S, **options: Any) -> Any:
        """Run to the end; returns a subprocess.CompletedProcess with text output."""
        options = {"capture_output": True, "text": True, **options}
        return subprocess.run(self.command(argv), timeout=timeout, **options)

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start; stdout and stderr are text pipes unless `options` change that."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(self.command(argv), **options)

    def must(self, *argv: str) -> str:
        """Run; returns its output. A failure is an error."""
        done = self.run(argv)
        if done.returncode:
            raise RuntimeError(f"on {self.name}: {' '.join(argv)}: {done.stderr.strip()}")
        return str(done.stdout)

    def traffic(self, interface: str = INTERFACE) -> Traffic:
        """Bytes through an interface since it was made."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        fields = next(
            line.split(":")[1].split() for line in lines if line.strip().startswith(f"{interface}:")
        )
        return Traffic(int(fields[0]), int(fields[8]))

    def processes(self) -> list[int]:
        """Every process in this host's network namespace except the one that keeps it alive."""
        mine = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == mine and int(entry) != self.pid:
                    found.append(int(entry))
        return found

    def kill(self) -> None:
        """Kill every process of this host. The kernel closes their connections, unless `cut` came before."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """End the host."""
        if self._process.poll() is None:
            self.kill()
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Node(Host):
    """A host with a link to the switch."""

    def __init__(self, number: int, switch: Host, network: int) -> None:
        super().__init__(f"host{number}")
        self.number = number
        self.port = f"p{number}"
        self._switch = switch
        self.address = f"10.{network}.0.{number + 1}"
        self.address6 = f"fd{network:02x}::{number + 1:x}"
        namespaces = ("netns", str(self.pid), "type", "veth", "peer", "name", self.port, "netns")
        switch.must("ip", "link", "add", INTERFACE, *namespaces, str(switch.pid))
        setup = (
            f"ip addr add {self.address}/24 dev {INTERFACE} &&"
            f"ip addr add {self.address6}/64 dev {INTERFACE} nodad && ip link set {INTERFACE} up"
        )
        self.must("sh", "-c", setup)
        switch.must("sh", "-c", f"ip link set {self.port} master {SWITCH} && ip link set {self.port} up")

    def cut(self) -> None:
        """Cut the link: packets are lost without a notice."""
        self._switch.must("bridge", "link", "set", "dev", self.port, "state", "0")

    def mend(self) -> None:
        """Restore the link."""
        self._switch.must("bridge", "link", "set", "dev", self.port, "state", "3")

    def shape(self, rate: str) -> None:
        """Limit the link in both directions, at a rate of tc, such as "1gbit". Empty: no limit."""
        for where, interface in ((self, INTERFACE), (self._switch, self.port)):
            where.run(["tc", "qdisc", "del", "dev", interface, "root"])
            if rate:
                limits = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
                where.must("tc", "qdisc", "add", "dev", interface, "root", *limits)


class Network:
    """The hosts, by number, and the settings of all links."""

    def __init__(self, count: int, number: int = 77) -> None:
        self.nodes: list[Node] = []
        self._relay: subprocess.Popen[str] | None = None
        self.switch = Host(SWITCH)
        try:
            self.switch.must("ip", "link", "add", SWITCH, "type", "bridge", "mcast_snooping", "0")
            self.switch.must("ip", "link", "set", SWITCH, "up")
            for each in range(count):
                self.nodes.append(Node(each, self.switch, number))
        except BaseException:
            self.remove()
            raise

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def shape(self, rate: str) -> None:
        """Limit every link; see `Node.shape`."""
        for node in self.nodes:
            node.shape(rate)

    def disturb(self, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 1) -> None:
        """Between hosts 0 and 1, delay every packet and drop a share of them, permanently.

        The two ports leave the bridge, and `lossy.py` carries packets from one to the other.
        """
        for node in self.nodes[:2]:
            self.switch.must("ip", "link", "set", node.port, "nomaster")
            node.must(sys.executable, str(HERE / "lossy.py"), "--plain", INTERFACE)
        ports = [node.port for node in self.nodes[:2]]
        argv = [sys.executable, str(HERE / "lossy.py"), *ports, str(delay_s), str(loss), str(seed)]
        self._relay = self.switch.start(argv, stderr=None)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError("the lossy link did not come up")

    def wait_until_up(self) -> None:
        """Wait until every host reaches every other: bridge ports need a moment."""
        deadline = time.monotonic() + READY_S
        addresses = [address for node in self.nodes for address in (node.address, node.address6)]
        for node in self.nodes:
            while node.run([sys.executable, "-S", str(HERE / "knock.py"), *addresses]).returncode:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{node.name} does not reach the others")

    def remove(self) -> None:
        """End every host, the relay and the switch."""
        for node in self.nodes:
            node.remove()
        self.switch.remove()
        if self._relay is not None:
            self._relay.wait()
            if self._relay.stdout is not None:
                self._relay.stdout.close()


@contextlib.contextmanager
def hosts(count: int, *, rate: str = "") -> Iterator[Network]:
    """`count` hosts that reach one another; removed at the end, with all their processes."""
    network = Network(count)
    try:
        network.wait_until_up()
        if rate:
            network.shape(rate)
        yield network
    finally:
        network.remove()
