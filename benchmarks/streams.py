"""Are several connections between two hosts faster than one? A bare probe, no Unisono. Needs root.

    python benchmarks/streams.py          an unshaped link, 1 Gbit/s, a long way, one that loses packets

Two processes on two namespaces exchange bytes, each as many as the other, over 1, 2 and 4 connections in
turns; a figure is the median over rounds, the ratio is to one connection in the same round. Both ends poll
and copy in one thread, as a rank of Unisono does, with the congestion control that Unisono would use there:
the system's, but not BBR on a near link.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hosts  # noqa: E402  (from tests/support)

COUNTS = (1, 2, 4)
PORT = 29500
PIECE = 1 << 20


class Link(NamedTuple):
    """A kind of link, and the bytes to exchange."""

    name: str
    nbytes: int
    rounds: int
    rate: str = ""
    delay_s: float = 0.0
    loss: float = 0.0


LINKS = (
    Link("unshaped, 1 MiB", 1 << 20, 40),
    Link("unshaped, 64 MiB", 64 << 20, 9),
    Link("1 Gbit/s, 16 MiB", 16 << 20, 5, rate="1gbit"),
    Link("10 ms each way, 4 MiB", 4 << 20, 5, delay_s=0.01),
    Link("10 ms each way, 1 % lost, 4 MiB", 4 << 20, 5, delay_s=0.01, loss=0.01),
)


# ---- one end -------------------------------------------------------------------------------------------


def exchange(connections: list[socket.socket], out: memoryview, into: memoryview) -> None:
    """Send `out` and receive `into`, cut evenly among the connections."""
    share = len(out) // len(connections)
    poller = select.poll()
    left = {}
    for number, connection in enumerate(connections):
        poller.register(connection, select.POLLIN | select.POLLOUT)
        first = number * share
        left[connection.fileno()] = [connection, first, first, first + share]  # sent to, received to, end
    while left:
        for descriptor, events in poller.poll():
            state = left[descriptor]
            connection, sent, got, end = state
            if events & select.POLLOUT and sent < end:
                state[1] += connection.send(out[sent : min(end, sent + PIECE)])
            if events & select.POLLIN and got < end:
                state[2] += connection.recv_into(into[got : min(end, got + PIECE)])
            if state[1] == state[2] == end:
                poller.unregister(connection)
                del left[descriptor]
            else:
                poller.modify(connection, select.POLLIN | (select.POLLOUT if state[1] < end else 0))


def prepare(connection: socket.socket, near: bool) -> socket.socket:
    """Set the options of Unisono's connections."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if near:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.setblocking(False)
    return connection


def end_main(address: str, link: Link, number: int) -> None:
    """Host 0 accepts and prints, host 1 connects."""
    if number:
        connections = [socket.create_connection((address, PORT)) for _ in range(max(COUNTS))]
    else:
        with socket.create_server((address, PORT)) as listener:
            print("ready", flush=True)
            connections = [listener.accept()[0] for _ in range(max(COUNTS))]
    connections = [prepare(connection, near=not link.delay_s) for connection in connections]
    out, into = (memoryview(bytearray(b"\1" * link.nbytes)) for _ in range(2))
    tick = memoryview(bytearray(max(COUNTS)))
    took: dict[int, list[float]] = {count: [] for count in COUNTS}
    for turn in range(link.rounds + 1):
        for count in COUNTS:
            exchange(connections[:1], tick[:1], tick[1:2])
            start = time.perf_counter()
            exchange(connections[:count], out, into)
            if turn:  # the first one warms up
                took[count].append(time.perf_counter() - start)
    if number == 0:
        print(json.dumps(took), flush=True)


# ---- both ----------------------------------------------------------------------------------------------


def measure(link: Link) -> dict[int, list[float]]:
    """Seconds of every round, by the number of connections."""
    with hosts.hosts(2, rate=link.rate) as net:
        if link.delay_s:
            net.disturb(delay_s=link.delay_s, loss=link.loss)
        words = [sys.executable, __file__, "--end", net[0].address, str(LINKS.index(link))]
        first = net[0].start([*words, "0"], stderr=None)
        assert first.stdout is not None
        first.stdout.readline()
        second = net[1].start([*words, "1"], stdout=subprocess.DEVNULL, stderr=None)
        text = first.communicate(timeout=300)[0]
        if first.returncode or second.wait(timeout=30):
            raise SystemExit(f"{link.name}: an end failed")
    return {int(count): seconds for count, seconds in json.loads(text).items()}


def main() -> int:
    """Measure all links, or one end of one."""
    if sys.argv[1:2] == ["--end"]:
        address, link, number = sys.argv[2:]
        end_main(address, LINKS[int(link)], int(number))
        return 0
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    missing = hosts.why_not()
    if missing:
        print(f"left out: {missing}", file=sys.stderr)
        return 1
    for link in LINKS:
        took = measure(link)
        cells = [f"{link.name:<34}"]
        for count in COUNTS:
            ratio = median(each / one for each, one in zip(took[count], took[1], strict=True))
            cells.append(f"{count}: {median(took[count]) * 1e3:8.2f} ms ({ratio:.2f})")
        print("   ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
