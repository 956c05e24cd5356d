"""Ports for servers that tests start."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved(count: int = 1) -> Iterator[int]:
    """The first of `count` successive free ports, for servers that reuse addresses.

    They stay bound: the system gives them to no other process, neither to listen nor for a connection.
    """
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            try:
                first = _bound(stack, socket.AF_INET, 0)
                for port in range(first, first + count):
                    if port > first:
                        _bound(stack, socket.AF_INET, port)
                    _bound(stack, socket.AF_INET6, port)
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise AssertionError("no ports in a row")


def _bound(stack: contextlib.ExitStack, family: socket.AddressFamily, port: int) -> int:
    sock = stack.enter_context(socket.socket(family))
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind(("", port))
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # if set before, it would allow ports that others have reserved
    return int(sock.getsockname()[1])
