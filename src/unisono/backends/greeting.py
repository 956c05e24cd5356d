"""How two ranks recognise each other on a new connection: both know a number that only their store holds.

It turns away strangers and stray connections. It does not withstand somebody who reads the store.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from unisono.errors import UnisonoError

__all__ = ["Stranger", "greet"]

_MAGIC = b"UNISONO\x01"
_NONCE_BYTES = 32
_NAME_BYTES = 64
_HELLO = struct.Struct(f">8s{_NONCE_BYTES}s{_NAME_BYTES}s")


class Stranger(UnisonoError):
    """The other end of a connection is not of this group."""


def greet(
    sock: socket.socket, token: bytes, *, role: str, me: str, expect: str | None, job: str, deadline_s: float
) -> str:
    """Check both ends of a connected socket; the peer's name.

    The other end gets `deadline_s` seconds and a few hundred bytes. The socket's timeout is changed.

    Args:
        token: what only members of the group know.
        role: "connect" or "accept".  me: this side's name.  expect: the peer's; None: any.
    Raises:
        Stranger: the other end does not know the token, has another name, or was silent.
    """
    deadline = time.monotonic() + deadline_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock.settimeout(deadline_s)
        sock.sendall(_HELLO.pack(_MAGIC, nonce, me.encode()))
        magic, theirs, padded = _HELLO.unpack(_read(sock, _HELLO.size, deadline))
        if magic != _MAGIC:
            raise Stranger(f"the other end speaks another protocol: {magic!r}")
        name = padded.rstrip(b"\0").decode("ascii", "replace")
        names = (me, name) if role == "connect" else (name, me)
        sock.sendall(_proof(token, role, job, names, theirs))
        given = _read(sock, 32, deadline)
        other = "accept" if role == "connect" else "connect"
        if not hmac.compare_digest(given, _proof(token, other, job, names, nonce)):
            raise Stranger("the other end is not of this group")
    except (OSError, TimeoutError) as error:
        raise Stranger(f"the other end did not introduce itself: {error}") from error
    if expect is not None and name != expect:
        raise Stranger(f"the other end is {name!r}, expected {expect!r}")
    return str(name)


def _proof(token: bytes, role: str, job: str, names: tuple[str, str], nonce: bytes) -> bytes:
    said = "\0".join((role, job, *names)).encode() + nonce
    return hmac.digest(token, said, hashlib.sha256)


def _read(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    taken = b""
    while len(taken) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it was silent")
        sock.settimeout(left)
        piece = sock.recv(nbytes - len(taken))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        taken += piece
    return taken
