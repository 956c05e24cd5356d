"""Who stands at a listening port and has not proved itself: few at once, each for a short time.

A stranger has 2 s. When many come it is less: the one that stood there longest goes, after 0.3 s at least, so
that a rank gets its turn however many half-open connections are in front of it. Those that there is no room
for wait in the kernel and cost nothing here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["STRANGER_S", "Guests"]

STRANGER_S = 2.0  # all the time a stranger gets
LEAST_S = 0.3  # what it gets when others wait
AT_ONCE = 64
NAP_S = 0.01


class Guests:
    """The connections of one listening socket that are being looked at."""

    def __init__(self, listener: socket.socket, look_at: Callable[[socket.socket], None]) -> None:
        """`look_at` handles a guest, in a thread of its own, and calls `know` for one that is none."""
        self._listener = listener
        self._look_at = look_at
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # the one that stood there longest comes first

    def serve(self, stopped: threading.Event, poll_s: float) -> None:
        """Accept until told to stop; then nobody is a guest any more."""
        self._listener.settimeout(poll_s)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while not stopped.is_set():
                if not self._has_room():
                    stopped.wait(NAP_S)
                    continue
                with contextlib.suppress(OSError):
                    guest, _ = self._listener.accept()
                    with self._lock:
                        self._since[guest] = time.monotonic()
                    pool.submit(self._receive, guest)
            with self._lock:
                for guest in self._since:
                    _send_away(guest)

    def know(self, guest: socket.socket) -> None:
        """It has proved itself, and may stay."""
        with self._lock:
            self._since.pop(guest, None)

    def _receive(self, guest: socket.socket) -> None:
        try:
            self._look_at(guest)
        finally:
            self.know(guest)

    def _has_room(self) -> bool:
        """Whether another may come; who has had its time goes when the place is needed."""
        with self._lock:
            if len(self._since) < AT_ONCE:
                return True
            first, since = next(iter(self._since.items()))
            if time.monotonic() - since >= LEAST_S:
                _send_away(first)
            return False


def _send_away(guest: socket.socket) -> None:
    """Whoever reads from it in another thread meets its end."""
    with contextlib.suppress(OSError):
        guest.shutdown(socket.SHUT_RDWR)
