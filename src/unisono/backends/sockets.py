"""The connections of one rank to those on other hosts, while they are being made."""

from __future__ import annotations

import socket
import threading

__all__ = ["KINDS", "Sockets"]

KINDS = ("control", "data", "messages")


class Sockets:
    """The connections of one rank, by kind and peer."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._held: dict[tuple[str, int], socket.socket] = {}

    def put(self, kind: str, peer: int, sock: socket.socket) -> None:
        """Keep a connection; one that comes twice replaces the first."""
        with self._changed:
            former = self._held.pop((kind, peer), None)
            self._held[kind, peer] = sock
            self._changed.notify_all()
        if former is not None:
            former.close()

    def missing(self, peers: list[int], wait_s: float) -> list[int]:
        """Those of `peers` that are not connected in every kind, after `wait_s` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lacking(peers), wait_s)
            return self._lacking(peers)

    def _lacking(self, peers: list[int]) -> list[int]:
        return [peer for peer in peers if any((kind, peer) not in self._held for kind in KINDS)]

    def detach(self, kind: str) -> list[int]:
        """Descriptors by rank, -1 where there is none; they are the caller's from now on."""
        with self._changed:
            found = [self._held.pop((kind, peer), None) for peer in range(self._size)]
        return [-1 if sock is None else sock.detach() for sock in found]

    def close(self) -> None:
        """Close what has not been detached."""
        with self._changed:
            held, self._held = self._held, {}
        for sock in held.values():
            sock.close()
