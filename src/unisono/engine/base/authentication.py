"""The job token, and how both ends of a connection prove that they have it.

The token is 32 secret bytes that every process of a job has: from a file that only its owner can read, or
from the environment, never from a command line. It is never sent. Each side sends a nonce and a proof:

    connect                                     accept
    Greeting(nonce, my name)         ->
                                     <-         Challenge(nonce, my name, proof)
    proof                            ->

    proof = HMAC-SHA256(key, role | job | both names | both nonces | binding), key = HMAC-SHA256(token, label)

Fresh nonces on both sides prevent replay, and the role prevents reflection. `binding` ties the proof to all
bytes before it. The handshake does not encrypt, and does not protect the bytes that follow. TLS does. It uses
the handshake's channel, a name that no other connection has, so that an attacker on the path cannot connect
the ends of two connections. See docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from unisono.errors import AuthenticationError, message

TOKEN_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_NAME_BYTES = 512
TOKEN_POLL_S = 0.05
MAGIC = b"UNISONO\x01"
LABEL = b"unisono handshake 1"
REMEDY = (
    "Give every process of the job the same token (UNISONO_TOKEN_FILE), and see which job has that address."
)
_GREETING = struct.Struct(f">{len(MAGIC)}s{NONCE_BYTES}sH")
_LENGTH = struct.Struct(">I")


class JobToken(bytes):
    """A secret whose repr does not show it, as in listings and tracebacks."""

    def __repr__(self) -> str:
        return "(secret)" if self else "(none)"

    __str__ = __repr__


class TokenMissing(ValueError):
    """A token file that does not exist, or that is not written to its end."""


def make_token() -> JobToken:
    """A new token: 256 random bits."""
    return JobToken(os.urandom(TOKEN_BYTES))


def parse_token(text: str) -> JobToken:
    """The token from 64 hexadecimal digits; the ValueError does not repeat the text."""
    try:
        token = JobToken(bytes.fromhex(text.strip()))
    except ValueError:
        token = JobToken()
    if len(token) != TOKEN_BYTES:
        raise ValueError("64 hexadecimal digits, as `openssl rand -hex 32` prints them")
    return token


def read_token_file(path: str) -> JobToken:
    """The token in a file of this user, or of root, that only its owner may read.

    Raises ValueError with the required form; TokenMissing while the file is absent, empty or a beginning.
    """
    good = "a file of 64 hexadecimal digits that belongs to you and that only you can read (chmod 600)"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        kind = TokenMissing if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{good}; it cannot be read: {error}") from None
    try:
        if wrong := _exposed(os.fstat(fd)):
            raise ValueError(f"{good}; {wrong}")
        text = os.read(fd, 4 * TOKEN_BYTES)
    except OSError as error:
        raise ValueError(f"{good}; it cannot be read: {error}") from None
    finally:
        os.close(fd)
    try:
        return parse_token(text.decode("ascii", "replace"))
    except ValueError:
        short = re.fullmatch(rb"[0-9a-fA-F]*\s*", text) is not None and len(text.strip()) < 2 * TOKEN_BYTES
        kind = TokenMissing if short else ValueError
        raise kind(f"{good}; it has {len(text.strip())} digits" if short else good) from None


def await_token_file(path: str, timeout_s: float, say: Callable[[str], None]) -> JobToken:
    """`read_token_file` of a file that another process makes or copies meanwhile, in a folder that exists.

    say: gets one line, if it has to wait.
    """
    deadline = time.monotonic() + timeout_s
    waits = False
    while True:
        try:
            return read_token_file(path)
        except TokenMissing as error:
            if not os.path.isdir(os.path.dirname(path) or "."):
                raise
            if time.monotonic() >= deadline:
                raise TokenMissing(f"{error}; waited {timeout_s:g} s for it") from None
            if not waits:
                lacks = f"has no whole token yet, waiting up to {timeout_s:g} s for it"
                say(f"{path} {lacks}: node 0 makes it, or it is copied here")
            waits = True
        time.sleep(TOKEN_POLL_S)


def _exposed(found: os.stat_result) -> str:
    """Why others know what is in a file, or can change it; "": they do not."""
    if stat.S_ISDIR(found.st_mode):
        return "it is a directory"
    if not stat.S_ISREG(found.st_mode):
        return "it is no ordinary file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    return f"its mode is {stat.S_IMODE(found.st_mode):04o}" if found.st_mode & 0o077 else ""


def token_file(path: str) -> JobToken:
    """The token in `path`; when there is no such file, a new token, written to it with mode 0600.

    Several processes may do this at once: all get one token.
    """
    if not os.path.exists(path):
        draft = f"{path}.{os.urandom(8).hex()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(make_token().hex() + "\n")
            os.link(draft, path)  # atomic: the first process decides
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    return read_token_file(path)


def derive(token: bytes, purpose: str) -> JobToken:
    """A key for one purpose. Neither the token nor other keys can be computed from it."""
    return JobToken(hmac.digest(token, b"unisono key\0" + purpose.encode(), hashlib.sha256))


def check_for_tls(token: bytes) -> None:
    """Raises ValueError without a token, ModuleNotFoundError without the package that makes certificates.

    Any process could make the certificate of an empty token.
    """
    if not token:
        raise ValueError(
            message(
                "TLS needs the job's token: its certificate is made from it",
                remedy="Set UNISONO_TOKEN_FILE (or UNISONO_TOKEN) on every rank, or UNISONO_TLS=0.",
            )
        )
    if importlib.util.find_spec("cryptography") is None:
        what, remedy = "TLS needs the package cryptography", "pip install 'unisono[tls]', or UNISONO_TLS=0."
        raise ModuleNotFoundError(message(what, remedy=remedy), name="cryptography")


class HandshakeResult(NamedTuple):
    """The result of a handshake.

    Attributes:
        name: the peer's.  channel: the unique name of the connection, equal at both ends.
    """

    name: str
    channel: str


def fresh_nonce() -> bytes:
    """A number used once."""
    return os.urandom(NONCE_BYTES)


def proof(
    token: bytes,
    *,
    role: str,
    job: str,
    names: tuple[str, str],
    nonces: tuple[bytes, bytes],
    binding: bytes = b"",
) -> bytes:
    """The proof that the sender has the token.

    Args:
        role: of the sender: "connect" or "accept"; "channel" for the name of the connection.
        names, nonces: of the side that connects and of the side that accepts, in this order.
    """
    parts = [role.encode(), job.encode(), *(name.encode() for name in names), *nonces, binding]
    covered = b"".join(_LENGTH.pack(len(part)) + part for part in parts)  # unambiguous
    return hmac.digest(hmac.digest(token, LABEL, "sha256"), covered, "sha256")


def channel_of(proved: bytes) -> str:
    """The name of a connection, from the proof of the role "channel"; as long as a host name may be."""
    return proved[:16].hex()


def verify(given: bytes, expected: bytes) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(given, expected)


def handshake(
    sock: socket.socket,
    token: bytes,
    *,
    role: str,
    me: str,
    expect: str | None,
    job: str,
    deadline_s: float,
    binding: bytes = b"",
) -> HandshakeResult:
    """Authenticate both ends of a connected, blocking socket; return the peer's name, and the channel's.

    It reads less than 1 KB from an unauthenticated peer. It changes the socket's timeout; close it after an
    error.

    Args:
        role: "connect" or "accept": which side this is.
        me: this side's name, bound into the proofs.  expect: the peer's required name; None: any.
        job: the same on both sides; it also separates the uses of one token ("data", "store").
        deadline_s: seconds for the whole handshake.
    Raises:
        AuthenticationError: the peer has another token or name, speaks another protocol, closed, or was too
        slow.
    """
    if role not in ("connect", "accept"):
        raise ValueError(f"role is {role!r}, expected 'connect' or 'accept'")
    side = _Handshake(sock, token, job, me, expect, time.monotonic() + deadline_s, binding)
    try:
        return side.connect() if role == "connect" else side.accept()
    except TimeoutError:
        raise AuthenticationError(_failed(f"the peer was silent for {deadline_s:g} s")) from None
    except OSError as error:
        raise AuthenticationError(_failed(f"the connection broke: {error}")) from None


class _Handshake:
    """One side of one handshake."""

    def __init__(
        self, sock: socket.socket, token: bytes, job: str, me: str, expect: str | None, deadline: float,
        binding: bytes,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._token = token
        self._job = job
        self._me = me
        self._expect = expect
        self._deadline = deadline
        self._binding = binding
        self._nonce = fresh_nonce()

    def connect(self) -> HandshakeResult:
        """Check the other side's proof first, then send ours."""
        self._sock.sendall(self._greeting())
        theirs, name = self._read_greeting()
        names, nonces = (self._me, name), (self._nonce, theirs)
        self._check(self._read(PROOF_BYTES), self._proof("accept", names, nonces))
        self._sock.sendall(self._proof("connect", names, nonces))
        return HandshakeResult(self._expected(name), channel_of(self._proof("channel", names, nonces)))

    def accept(self) -> HandshakeResult:
        """The same on the accepting side."""
        theirs, name = self._read_greeting()
        names, nonces = (name, self._me), (theirs, self._nonce)
        self._sock.sendall(self._greeting() + self._proof("accept", names, nonces))
        self._check(self._read(PROOF_BYTES), self._proof("connect", names, nonces))
        return HandshakeResult(self._expected(name), channel_of(self._proof("channel", names, nonces)))

    def _greeting(self) -> bytes:
        name = self._me.encode()
        if len(name) > MAX_NAME_BYTES:
            raise ValueError(f"a name is at most {MAX_NAME_BYTES} bytes, got {len(name)}")
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        return _GREETING.pack(MAGIC, self._nonce, len(name)) + name

    def _read_greeting(self) -> tuple[bytes, str]:
        magic, nonce, length = _GREETING.unpack(self._read(_GREETING.size))
        if magic != MAGIC or length > MAX_NAME_BYTES:
            raise AuthenticationError(_failed("the peer speaks another protocol", repr(magic)))
        try:
            return nonce, self._read(length).decode()
        except UnicodeDecodeError:
            raise AuthenticationError(_failed("the peer's name is no text")) from None

    def _read(self, nbytes: int) -> bytes:
        taken = b""
        while len(taken) < nbytes:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            piece = self._sock.recv(nbytes - len(taken))
            if not piece:
                raise AuthenticationError(
                    _failed("the peer closed the connection", "its end of file", REMEDY)
                )
            taken += piece
        return taken

    def _proof(self, role: str, names: tuple[str, str], nonces: tuple[bytes, bytes]) -> bytes:
        return proof(self._token, role=role, job=self._job, names=names, nonces=nonces, binding=self._binding)

    def _check(self, given: bytes, expected: bytes) -> None:
        if not verify(given, expected):
            raise AuthenticationError(_failed("the peer's proof is wrong", "another token or job", REMEDY))

    def _expected(self, name: str) -> str:
        if self._expect is not None and name != self._expect:
            raise AuthenticationError(
                message("the wrong peer answered", observed=repr(name), expected=repr(self._expect))
            )
        return name


def _failed(what: str, observed: str = "", remedy: str = "") -> str:
    return message(f"handshake failed: {what}", observed=observed, remedy=remedy)
