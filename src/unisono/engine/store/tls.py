"""TLS 1.3 between processes that share the job's token: each makes the same key and certificate from it.

Both sides present this certificate and trust no other, so both ends of a connection have the token. There is
no authority and there are no files. The only name to check is that of the connection (`channel`), which the
client gives as the server's name: without it, an attacker on the path could connect a client to another
server of the job. Only a peer that has proved the token (`admission`) reaches the TLS library.

Python's `ssl` makes no certificates, and has pre-shared keys only since 3.13. The package `cryptography`
(`unisono[tls]`) makes the certificate.
"""

from __future__ import annotations

import os
import socket
import ssl
from datetime import datetime, timezone
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from unisono.engine.base.authentication import check_for_tls, derive

__all__ = ["TlsSocket", "certificate", "context"]


def certificate(token: bytes) -> tuple[bytes, bytes]:
    """(certificate, private key) of the job, both PEM, the same in every process that has the token.

    It does not expire: the job's token is its only time limit.
    """
    key = Ed25519PrivateKey.from_private_bytes(derive(token, "tls"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "unisono job")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=timezone.utc))
        .sign(key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM), private


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that raises BlockingIOError like a plain one.

    Attributes:
        channel: the name of this connection at both ends.
    """

    channel: str

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """See `socket.recv_into`."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket.send`."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def context(token: bytes, *, server: bool) -> ssl.SSLContext:
    """A context for TLS 1.3 only, with the job's certificate on both sides, which is the only trusted one.

    Raises:
        ValueError: there is no token.
    """
    check_for_tls(token)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the one certificate names no host
    made.verify_mode = ssl.CERT_REQUIRED
    made.sslsocket_class = TlsSocket
    if server:
        made.sni_callback = _refuse_others
    public, private = certificate(token)
    made.load_verify_locations(cadata=public.decode())
    memory = os.memfd_create("unisono-key", os.MFD_CLOEXEC)  # the library loads keys from files only
    try:
        os.write(memory, public + private)
        made.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return made


def _refuse_others(sock: Any, name: str | None, _made: ssl.SSLContext) -> int | None:
    """Refuse a client that expects another connection: all connections of the job share one certificate."""
    return None if name == sock.channel else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def wrap_socket(sock: socket.socket, made: ssl.SSLContext, *, server: bool, channel: str) -> TlsSocket:
    """`sock` as a TLS socket, which takes it over. The handshake happens with the first data.

    `channel`: of `authentication.HandshakeResult`. If it differs at the two ends, the TLS handshake fails.
    """
    name = None if server else channel
    tls = made.wrap_socket(sock, server_side=server, do_handshake_on_connect=False, server_hostname=name)
    assert isinstance(tls, TlsSocket)
    tls.channel = channel
    return tls
