"""The connections of one rank to ranks on other hosts, until the engine takes them."""

from __future__ import annotations

import contextlib
import socket
import threading

KINDS = ("control", "data", "messages")
TCP_RTO_MAX_MS = 44  # of Linux since 6.15
MOST_KEEPALIVE_S = 32767  # the kernel's limit


class PeerSockets:
    """The connections of one rank, by kind and peer."""

    def __init__(self, size: int, kinds: tuple[str, ...] = KINDS) -> None:
        self._size = size
        self._kinds = kinds
        self._changed = threading.Condition()
        self._held: dict[tuple[str, int], socket.socket] = {}
        self._closed = False

    def put(self, kind: str, peer: int, sock: socket.socket) -> None:
        """Keep a connection. A second one replaces the first; one that arrives too late is closed."""
        with self._changed:
            former = sock if self._closed else self._held.pop((kind, peer), None)
            if not self._closed:
                self._held[kind, peer] = sock
            self._changed.notify_all()
        if former is not None:
            former.close()

    def missing(self, peers: list[int], wait_s: float) -> list[int]:
        """Wait at most `wait_s` seconds; returns the `peers` without connections of every kind."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lacking(peers), wait_s)
            return self._lacking(peers)

    def _lacking(self, peers: list[int]) -> list[int]:
        return [peer for peer in peers if any((kind, peer) not in self._held for kind in self._kinds)]

    def detach(self, kind: str) -> list[int]:
        """Descriptors by rank, -1 where there is none; the caller owns them from now on."""
        with self._changed:
            found = [self._held.pop((kind, peer), None) for peer in range(self._size)]
        return [-1 if sock is None else sock.detach() for sock in found]

    def close(self) -> None:
        """Close all sockets that are not detached."""
        with self._changed:
            held, self._held = self._held, {}
            self._closed = True
        for sock in held.values():
            sock.close()


def prepare(sock: socket.socket, kind: str, *, peer_timeout_s: float, buffer_bytes: int) -> None:
    """Set the options of a connection of that kind; 0 bytes: the kernel chooses the buffers."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(peer_timeout_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(max(1, seconds // 4), MOST_KEEPALIVE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(max(1, seconds // 8), MOST_KEEPALIVE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 8)
    # The kernel then resends soon after a broken link works again. It gives up after fifteen attempts, which
    # has to be later than the peer timeout.
    longest_ms = min(max(1000, round(1000 * peer_timeout_s / 8)), 120_000)
    with contextlib.suppress(OSError):  # an older kernel: its intervals double up to two minutes
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, longest_ms)
    if kind == "control":
        milliseconds = max(1, round(1000 * peer_timeout_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
