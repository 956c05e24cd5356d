"""Limits how many connections to a rank may be unauthenticated at one time.

An unauthenticated peer has connected but has not yet proved that it belongs to the group. When the limit is
reached, the oldest such connection is closed, provided it had enough time for an honest handshake. Silent
connections therefore delay a new one by fractions of a second, however many they are.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

__all__ = ["UnauthenticatedConnections"]


class UnauthenticatedConnections:
    """The unauthenticated connections of one listener. One thread adds them, handshake threads remove them.

    Args:
        most: connections at one time.  patience_s: the least time each gets while others wait.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._since: dict[socket.socket, float] = {}  # the oldest first

    def __enter__(self) -> UnauthenticatedConnections:
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect all of them."""
        with self._changed:
            for peer in list(self._since):
                self._disconnect(peer)

    def make_room(self) -> None:
        """Wait until one more connection is allowed; at most for the oldest one's patience."""
        with self._changed:
            while len(self._since) >= self._most:
                oldest, since = next(iter(self._since.items()))
                left = since + self._patience_s - time.monotonic()
                if left <= 0:
                    self._disconnect(oldest)
                else:
                    self._changed.wait(left)

    def add(self, peer: socket.socket) -> None:
        """Count a new connection."""
        with self._changed:
            self._since[peer] = time.monotonic()

    def remove(self, peer: socket.socket) -> bool:
        """Stop counting a connection that is authenticated or will be closed. False: it was disconnected."""
        with self._changed:
            self._changed.notify()
            return self._since.pop(peer, None) is not None

    def _disconnect(self, peer: socket.socket) -> None:
        """End the connection; this wakes the thread that reads from it."""
        del self._since[peer]
        with contextlib.suppress(OSError):  # the peer has closed it already
            peer.shutdown(socket.SHUT_RDWR)
