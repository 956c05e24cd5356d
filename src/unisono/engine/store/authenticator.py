"""Authenticates the store's clients, and limits the cost of unauthenticated peers.

An unauthenticated peer has not yet sent its Hello or, if the job has a token, its proof. It may send
`wire.HELLO_LIMIT` bytes and stay for two seconds. When the limit of such peers is reached, the oldest one is
dropped, provided it had enough time for an honest handshake. So many silent connections delay a new client by
a fraction of a second, and do not delay authenticated clients.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.engine.base import authentication
from unisono.engine.store import wire

if TYPE_CHECKING:
    import ssl

__all__ = ["PATIENCE_S", "AdmissionPolicy", "Authenticator", "ClientHandshake"]

PATIENCE_S = 0.3  # the least time an unauthenticated peer gets while others wait
SERVER = "store"  # the server's name in the handshake


class AdmissionPolicy(msgspec.Struct, frozen=True):
    """The requirements for clients, and the limit of unauthenticated ones; see `StoreServer`."""

    job: str
    token: bytes
    tls: bool
    max_frame_bytes: int
    hello_timeout_s: float
    max_unauthenticated: int


class ClientHandshake:
    """The handshake of one connection. `name` and `channel` are set once it is authenticated."""

    def __init__(self) -> None:
        self.name = ""
        self.channel = ""
        self.hello: wire.ClientHello | None = None
        self.nonce = b""


class Authenticator:
    """Answers unauthenticated peers."""

    def __init__(self, rules: AdmissionPolicy) -> None:
        self.rules = rules
        self._server = os.urandom(8).hex()
        if rules.tls:
            authentication.check_for_tls(rules.token)
        self._tls: ssl.SSLContext | None = _tls().context(rules.token, server=True) if rules.tls else None

    def answer(
        self, caller: ClientHandshake, head: bytearray, full: Callable[[str], bool]
    ) -> wire.ServerWelcome | wire.ServerChallenge | wire.Rejection:
        """The answer to the next frame of an unauthenticated peer. Raises `wire.FrameFormatError` for other
        bytes.

        Args:
            full: whether a client of that name is too late, because the job is ending.
        """
        if caller.hello is not None:
            return self._judge(caller, caller.hello, wire.read_proof(head))
        hello = wire.read_hello(head)
        refusal = self._refusal(hello, full)
        if refusal is not None:
            return refusal
        if self.rules.token:
            caller.hello, caller.nonce = hello, authentication.fresh_nonce()
            return wire.ServerChallenge(wire.MAGIC, caller.nonce, self._proof("accept", hello, caller.nonce))
        return self._let_in(caller, hello)

    def _judge(
        self, caller: ClientHandshake, hello: wire.ClientHello, given: wire.TokenProof
    ) -> wire.ServerWelcome | wire.Rejection:
        if not authentication.verify(given.proof, self._proof("connect", hello, caller.nonce)):
            return wire.Rejection(wire.MAGIC, "token", "the job's token here is another one")
        caller.channel = authentication.channel_of(self._proof("channel", hello, caller.nonce))
        return self._let_in(caller, hello)

    def _let_in(self, caller: ClientHandshake, hello: wire.ClientHello) -> wire.ServerWelcome:
        caller.name, caller.hello = hello.client, None
        most = self.rules.max_frame_bytes
        me = (socket.gethostname(), os.getpid(), self._server)
        return wire.ServerWelcome(wire.MAGIC, wire.VERSION, most, *me)

    def _proof(self, role: str, hello: wire.ClientHello, nonce: bytes) -> bytes:
        return store_proof(self.rules.token, role, hello, nonce)

    def _refusal(self, hello: wire.ClientHello, full: Callable[[str], bool]) -> wire.Rejection | None:
        rules = self.rules
        if hello.version != wire.VERSION:
            text = (
                f"it speaks version {wire.VERSION}, the client {hello.version}: install the same everywhere"
            )
            return wire.Rejection(wire.MAGIC, "version", text)
        if hello.server not in ("", self._server):
            return wire.Rejection(wire.MAGIC, "server", "the client means the server that was here before")
        if hello.job != rules.job:
            text = f"it belongs to job {rules.job!r}, not to {hello.job!r}"
            return wire.Rejection(wire.MAGIC, "job", text)
        if bool(rules.token) != (len(hello.nonce) == authentication.NONCE_BYTES):
            return wire.Rejection(wire.MAGIC, "token", _PROVE_IT if rules.token else _NO_PROOF)
        if rules.tls != hello.tls:
            text = "TLS is on " + ("there and not here" if rules.tls else "here and not there")
            return wire.Rejection(wire.MAGIC, "token", f"{text}: set UNISONO_TLS alike everywhere")
        if not hello.client:
            return wire.Rejection(wire.MAGIC, "version", "the client gave no name")
        if full(hello.client):
            return wire.Rejection(wire.MAGIC, "closing", "its job is ending")
        return None

    def secured(self, sock: socket.socket, caller: ClientHandshake) -> socket.socket:
        """The socket for an authenticated client: `sock`, or TLS over it."""
        if self._tls is None:
            return sock
        tls: socket.socket = _tls().wrap_socket(sock, self._tls, server=True, channel=caller.channel)
        return tls

    def has_deciphered(self, sock: Any) -> bool:
        """Whether TLS has decrypted bytes ready, which no selector reports."""
        return self._tls is not None and isinstance(sock, _tls().TlsSocket) and sock.pending() > 0


def _tls() -> Any:
    """The module, imported late: the TLS library is slow to load."""
    from unisono.engine.store import tls

    return tls


_PROVE_IT = (
    "it asks for the job's token and none was given. Set UNISONO_TOKEN_FILE (or UNISONO_TOKEN) to that of "
    "the process that serves it"
)
_NO_PROOF = (
    "it has no token and one was given here. Set UNISONO_TOKEN_FILE (or UNISONO_TOKEN) for the process "
    "that serves it, too"
)


def store_proof(token: bytes, role: str, hello: wire.ClientHello, nonce: bytes) -> bytes:
    """The proof of either side of a store's connection; it covers the client's whole Hello."""
    hello_bytes = msgspec.msgpack.encode(hello)
    return authentication.proof(
        token, role=role, job=f"store {hello.job}", names=(hello.client, SERVER), nonces=(hello.nonce, nonce),
        binding=hello_bytes,
    )  # fmt: skip
