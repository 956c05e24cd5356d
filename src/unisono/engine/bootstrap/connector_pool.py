"""Connects to many ranks at once, until all are connected, one fails, or the user interrupts.

This module does not depend on what a connection carries.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["ConnectorPool", "start_thread"]

THREADS = 8  # a connection without an answer must not delay the others
CALL_S = 2.0  # for one attempt to connect; a thread sees within this time that it has to stop


class ConnectorPool:
    """Threads that connect. The event `stopped` ends them; a failure sets it, too."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._connected: list[socket.socket] = []

    def each(self, connect: Callable[[int, str], None], calls: list[tuple[int, str]]) -> None:
        """Run `connect(peer, kind)` for all calls. The first failure ends all of them, and is raised."""
        left = iter(calls)
        failures: list[BaseException] = []
        threads: list[threading.Thread] = []
        try:
            count = min(THREADS, len(calls))
            threads.extend(start_thread(self._work, connect, left, failures) for _ in range(count))
            for thread in threads:
                thread.join()
        except BaseException:  # no more threads can be started, or Ctrl-C
            self._hang_up()
            for thread in threads:
                thread.join()
            raise
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # breaks the reference cycle through a failure's traceback

    def _work(
        self,
        connect: Callable[[int, str], None],
        left: Iterator[tuple[int, str]],
        failures: list[BaseException],
    ) -> None:
        """One thread: all threads take calls from the same list, until one has failed."""
        try:
            for peer, kind in left:
                if self._stopped.is_set():
                    return
                connect(peer, kind)
        except BaseException as error:  # noqa: BLE001 (raised by the thread that joins them)
            failures.append(error)
            self._hang_up()

    def _hang_up(self) -> None:
        self._stopped.set()
        for sock in list(self._connected):
            with contextlib.suppress(OSError):  # already closed, or owned by the engine
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    def connect(self, host: str, port: int, limit_s: float, source: str | None) -> socket.socket | None:
        """A connection from the address `source`; None: connecting was stopped.

        Raises:
            OSError: it failed, or no answer came within `limit_s` seconds.
        """
        give_up = time.monotonic() + limit_s
        while not self._stopped.is_set():
            left = max(give_up - time.monotonic(), 0.001)
            try:
                bound = None if source is None else (source, 0)
                sock = socket.create_connection((host, port), min(left, CALL_S), bound)
            except TimeoutError:
                if left <= CALL_S:
                    raise
            else:
                self._connected.append(sock)
                if not self._stopped.is_set():
                    return sock
                sock.close()
        return None


def start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """A started thread."""
    thread = threading.Thread(target=target, args=args)
    thread.start()
    return thread
