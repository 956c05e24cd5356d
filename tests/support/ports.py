"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved(count: int = 1) -> Iterator[int]:
    """The first of `count` ports in a row on which nobody listens, but for a server that reuses addresses.

    They stay bound: nobody else is given them meanwhile, neither to listen nor for a connection.
    """
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            first = 0
            try:
                for i in range(count):
                    sock = stack.enter_context(socket.socket())
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(("", first + i if i else 0))
                    first = first or int(sock.getsockname()[1])
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise AssertionError("no ports in a row")
