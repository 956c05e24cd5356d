"""Who stands at a rank's door: connections that have not shown yet that they belong to the group.

There is room for so many. When all places are taken, the one that has stood there longest goes, once it had
time enough for an honest handshake: silent strangers delay a newcomer by fractions of a second, whatever
their number. Nobody is waited for when the door is shut.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

__all__ = ["Guests"]


class Guests:
    """The connections at one door. One thread lets them come, those that talk to them let them go.

    Args:
        most: places.  patience_s: what a guest gets, at least, when others wait behind it.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._since: dict[socket.socket, float] = {}  # the oldest first

    def __enter__(self) -> Guests:
        return self

    def __exit__(self, *_: object) -> None:
        """Turn all away."""
        with self._changed:
            for guest in list(self._since):
                self._turn_away(guest)

    def make_room(self) -> None:
        """Wait until one more may come: for the oldest one's patience, at most."""
        with self._changed:
            while len(self._since) >= self._most:
                oldest, since = next(iter(self._since.items()))
                left = since + self._patience_s - time.monotonic()
                if left <= 0:
                    self._turn_away(oldest)
                else:
                    self._changed.wait(left)

    def came(self, guest: socket.socket) -> None:
        """One more stands at the door."""
        with self._changed:
            self._since[guest] = time.monotonic()

    def went(self, guest: socket.socket) -> bool:
        """It is nobody to be turned away any more, but in or to be closed. False: it was turned away."""
        with self._changed:
            self._changed.notify()
            return self._since.pop(guest, None) is not None

    def _turn_away(self, guest: socket.socket) -> None:
        """End the connection, waking the thread that reads from it."""
        del self._since[guest]
        with contextlib.suppress(OSError):  # it has gone by itself
            guest.shutdown(socket.SHUT_RDWR)
