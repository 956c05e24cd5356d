"""Addresses of stores: listening on exactly the given one, and formatting one."""

from __future__ import annotations

import errno
import socket

from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.base.validation import text, whole
from unisono.errors import StoreError, message

__all__ = ["address_text", "listen", "reserve"]


def listen(host: str, port: int) -> socket.socket:
    """A listening, non-blocking socket on the first address of `host` that can be bound."""
    return _bound(host, port, listening=True)


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port of that same address. It never listens.

    Until it is closed, Linux gives the port to no other process by chance. A server that sets SO_REUSEADDR
    can listen there, as `listen`, torch's TCPStore and every asyncio server do.
    """
    return _bound(host, 0, listening=False)


def _bound(host: str, port: int, *, listening: bool) -> socket.socket:
    try:
        port = whole(port, "port", 0, 65535)
        found = socket.getaddrinfo(text(host, "host"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise StoreError(message(f"cannot listen on {address_text(host, port)}: {error}")) from error
    failure = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, _, _, _, address in found:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            failure = error
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            if listening:
                listener.listen(1024)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            failure = error
    raise StoreError(_bind_text(host, port, failure)) from failure


def _bind_text(host: str, port: int, failure: OSError) -> str:
    remedies = {
        errno.EADDRINUSE: "Another program (or an earlier run) has that port: end it, or choose another.",
        errno.EADDRNOTAVAIL: "That is no address of this host; rank 0 has to run on the master's host.",
        errno.EACCES: "Choose a port above 1023.",
    }
    if is_limit(failure):
        return f"cannot listen on {address_text(host, port)}: {limit_text(failure)}"
    what = f"cannot listen on {address_text(host, port)}: {failure.strerror or failure}"
    return message(what, remedy=remedies.get(failure.errno or 0, ""))


def address_text(host: str, port: int) -> str:
    """The address as text: "127.0.0.1:29500", "[::1]:29500"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
