"""TLS 1.3 between processes that share the job's token: each makes the same key and certificate from it.

Both sides present this certificate and trust no other, so both ends of a connection have the token. There is
no authority and there are no files. The only name to check is that of the connection (`channel`), which the
client gives as the server's name: without it, an attacker on the path could connect a client to another
server of the job. Only a peer that has proved the token (`admission`) reaches the TLS library.

Python's `ssl` makes no certificates and has pre-shared keys only since 3.13, so the few lines of Ed25519 and
DER below do it. They make one key at start; the TLS library makes every signature of a connection. Their time
depends on the secret, so they must not be used for anything that answers a peer.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
from typing import Any

from unisono.engine.base.authentication import check_for_tls, derive

__all__ = ["TlsSocket", "certificate", "context"]

# Ed25519 (RFC 8032): the field, the curve's constant, the base point and its order.
P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493
BASE_Y = 4 * pow(5, P - 2, P) % P
BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
Point = tuple[int, int, int, int]  # x/z, y/z and x*y/z
BASE: Point = (BASE_X, BASE_Y, 1, BASE_X * BASE_Y % P)


def _add(one: Point, two: Point) -> Point:
    """RFC 8032, section 5.1.4."""
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = two
    a, b = (y1 - x1) * (y2 - x2) % P, (y1 + x1) * (y2 + x2) % P
    c, d = 2 * t1 * t2 * D % P, 2 * z1 * z2 % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def _times(scalar: int, point: Point) -> Point:
    result: Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _packed(point: Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, P - 2, P)
    return (y * inverse % P | (x * inverse % P & 1) << 255).to_bytes(32, "little")


def _expanded(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    return scalar, digest[32:]


def public_key(seed: bytes) -> bytes:
    """The Ed25519 public key of a 32-byte secret key."""
    return _packed(_times(_expanded(seed)[0], BASE))


def signature(seed: bytes, text: bytes) -> bytes:
    """The Ed25519 signature of `text`."""
    scalar, prefix = _expanded(seed)
    public = public_key(seed)
    nonce = int.from_bytes(hashlib.sha512(prefix + text).digest(), "little") % ORDER
    commitment = _packed(_times(nonce, BASE))
    challenge = int.from_bytes(hashlib.sha512(commitment + public + text).digest(), "little")
    return commitment + ((nonce + challenge * scalar) % ORDER).to_bytes(32, "little")


def _der(tag: int, *parts: bytes) -> bytes:
    """One DER value."""
    body = b"".join(parts)
    size = len(body)
    length = bytes([size]) if size < 128 else bytes([0x82]) + size.to_bytes(2, "big")
    return bytes([tag]) + length + body


SEQUENCE, SET, INTEGER, BITS, OID, UTF8, TIME = 0x30, 0x31, 0x02, 0x03, 0x06, 0x0C, 0x18
ED25519 = _der(SEQUENCE, _der(OID, bytes.fromhex("2b6570")))
COMMON_NAME = bytes.fromhex("550403")


def certificate(token: bytes) -> tuple[str, str]:
    """(certificate, private key) of the job, both PEM, the same in every process that has the token.

    It does not expire: the job's token is its only time limit.
    """
    seed = derive(token, "tls")
    common = _der(SEQUENCE, _der(OID, COMMON_NAME), _der(UTF8, b"unisono job"))
    name = _der(SEQUENCE, _der(SET, common))
    validity = _der(SEQUENCE, _der(TIME, b"20000101000000Z"), _der(TIME, b"99991231235959Z"))
    key = _der(SEQUENCE, ED25519, _der(BITS, b"\0" + public_key(seed)))
    version, serial = _der(0xA0, _der(INTEGER, b"\2")), _der(INTEGER, b"\1")
    signed = _der(SEQUENCE, version, serial, ED25519, name, validity, name, key)
    whole = _der(SEQUENCE, signed, ED25519, _der(BITS, b"\0" + signature(seed, signed)))
    private = bytes.fromhex("302e020100300506032b657004220420") + seed
    return _pem("CERTIFICATE", whole), _pem("PRIVATE KEY", private)


def _pem(title: str, body: bytes) -> str:
    text = base64.encodebytes(body).decode()
    return f"-----BEGIN {title}-----\n{text}-----END {title}-----\n"


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
    made.load_verify_locations(cadata=public)
    memory = os.memfd_create("unisono-key", os.MFD_CLOEXEC)  # the library loads keys from files only
    try:
        os.write(memory, (public + private).encode())
        made.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return made


def _refuse_others(sock: Any, name: str | None, _made: ssl.SSLContext) -> int | None:
    """Refuse a client that expects another connection: all connections of the job share one certificate."""
    return None if name == sock.channel else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def wrapped(sock: socket.socket, made: ssl.SSLContext, *, server: bool, channel: str) -> TlsSocket:
    """`sock` as a TLS socket, which takes it over. The handshake happens with the first data.

    `channel`: of `authentication.Met`. If it differs at the two ends, the TLS handshake fails.
    """
    name = None if server else channel
    tls = made.wrap_socket(sock, server_side=server, do_handshake_on_connect=False, server_hostname=name)
    assert isinstance(tls, TlsSocket)
    tls.channel = channel
    return tls
