"""The store's protocol on a stream: frames, and the greeting that comes first.

    frame    u32 head bytes, u32 payload bytes (big endian) | head: MessagePack | payload: raw value

    client                           server
    Hello(magic, version, job, ...)  ->
                                     <-  Challenge(nonce, proof) where the job has a token
    Proof                            ->
                                     <-  Welcome, or Refused(reason) and the connection is closed
    ................................ TLS 1.3 from here on, where it was asked for
    operation (+ payload)            ->
                                     <-  Answer (+ payload); a get or wait is answered when its keys exist

One request is under way per connection. Before its Welcome a peer's frames have at most `HELLO_LIMIT` bytes.
The magic ends in an empty line, so that a web server at the address answers at once instead of waiting for
more.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from unisono.engine.store.operations import Op, Reply, Value

_Head = TypeVar("_Head")

MAGIC = "UNISONO STORE\r\n\r\n"
VERSION = 4
HELLO_LIMIT = 4096
PREFIX = struct.Struct(">II")
FIRST = 1 << 20  # bytes allocated at first for a frame; more are allocated as they arrive
CHUNK = 256 * 1024  # bytes read at a time, so that one large value does not starve the others


class FrameFormatError(Exception):
    """The bytes of a stream are no frames of this protocol. `seen`: the first of them."""

    def __init__(self, why: str, seen: bytes = b"") -> None:
        super().__init__(why)
        self.seen = seen


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A client's first frame. `nonce` is empty where the client has no token.

    `server`: the server that authenticated it before; empty: any.
    """

    magic: str
    version: int
    job: str
    client: str
    host: str = ""
    pid: int = 0
    nonce: bytes = b""
    tls: bool = False
    server: str = ""


class ServerChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The server's nonce, and its proof that it has the token."""

    magic: str
    nonce: bytes
    proof: bytes


class TokenProof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The client's answer to a Challenge."""

    proof: bytes


class ServerWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The server accepts the client: its identity, and the largest frame that it accepts.

    `server` is a random number of each server, which distinguishes it from the next one on the same port.
    """

    magic: str
    version: int
    max_frame_bytes: int
    host: str
    pid: int
    server: str


class Rejection(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The last frame. `reason`: "version", "job", "token", "server", "closing"; `text`: for people."""

    magic: str
    reason: str
    text: str


class ReplyHeader(msgspec.Struct, frozen=True, array_like=True):
    """A `Reply` without its value, which is the frame's payload."""

    number: int = 0
    missing: tuple[str, ...] = ()
    error: str = ""


Greeting = ServerWelcome | ServerChallenge | Rejection
_decode_hello = msgspec.msgpack.Decoder(ClientHello).decode
_decode_proof = msgspec.msgpack.Decoder(TokenProof).decode
_decode_greeting = msgspec.msgpack.Decoder(Greeting).decode
_decode_answer = msgspec.msgpack.Decoder(ReplyHeader).decode


def frame(head: msgspec.Struct, payload: Value = b"") -> list[Value]:
    """The pieces to send, in order; `payload` itself is not copied."""
    body = msgspec.msgpack.encode(head)
    start = PREFIX.pack(len(body), len(payload)) + body
    if len(payload) <= CHUNK:
        return [start + payload]
    return [start, payload]


def reply_frame(reply: Reply) -> list[Value]:
    """`reply` as the pieces to send."""
    return frame(ReplyHeader(reply.number, reply.missing, reply.error), reply.value)


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """An operation and the seconds it may wait for its keys."""

    op: Op
    timeout_s: float


_decode_request = msgspec.msgpack.Decoder(StoreRequest).decode


def _read(decode: Callable[[bytearray], _Head], head: bytearray, what: str) -> _Head:
    """A decoded head; raises `FrameFormatError` for other bytes, and for a greeting of another protocol."""
    try:
        found = decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # lists in lists, a thousand
        raise FrameFormatError(f"no {what}: {error}", bytes(head[:40])) from error
    if getattr(found, "magic", MAGIC) != MAGIC:
        raise FrameFormatError("wrong magic", bytes(head[:40]))
    return found


def read_hello(head: bytearray) -> ClientHello:
    """Raises `FrameFormatError` for anything but a Hello of this protocol."""
    return _read(_decode_hello, head, "Hello")


def read_proof(head: bytearray) -> TokenProof:
    """Raises `FrameFormatError` for anything but a Proof."""
    return _read(_decode_proof, head, "Proof")


def read_greeting(head: bytearray) -> Greeting:
    """Raises `FrameFormatError` for anything but a server's greeting."""
    greeting: Greeting = _read(_decode_greeting, head, "greeting")
    return greeting


def read_request(head: bytearray) -> StoreRequest:
    """Raises `FrameFormatError` for anything but a request."""
    return _read(_decode_request, head, "request")


def read_answer(head: bytearray, payload: bytearray) -> Reply:
    """Raises `FrameFormatError` for anything but an answer."""
    answer = _read(_decode_answer, head, "answer")
    return Reply(answer.number, payload, answer.missing, answer.error)


class FrameReader:
    """Reads frames from a blocking or non-blocking socket, piece by piece.

    Memory grows with the received bytes, not with the announced size.

    Args:
        limit: the largest accepted frame, in bytes, head and payload together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._begin()

    def _begin(self) -> None:
        self._parts = [bytearray(PREFIX.size)]
        self._sizes = [PREFIX.size]
        self._at = 0
        self._filled = 0

    @property
    def idle(self) -> bool:
        """Whether no part of a frame has arrived."""
        return self._at == 0 and self._filled == 0

    def advance(self, sock: socket.socket) -> tuple[bytearray, bytearray] | None:
        """Read once; returns (head, payload) when that completes a frame.

        Raises:
            EOFError: the peer closed.  Unreadable: the bytes are no frame.  OSError: see `socket.recv_into`.
        """
        part = self._parts[self._at]
        with memoryview(part) as view, view[self._filled : self._filled + CHUNK] as room:
            got = sock.recv_into(room)
        if got == 0:
            raise EOFError
        self._filled += got
        if self._filled == len(part) < self._sizes[self._at]:
            part.extend(bytes(min(len(part), self._sizes[self._at] - len(part))))
        while self._filled == self._sizes[self._at]:
            if self._at == 0:
                self._measure()
            self._at += 1
            self._filled = 0
            if self._at == len(self._parts):
                _, head, payload = self._parts
                self._begin()
                return head, payload
        return None

    def _measure(self) -> None:
        prefix = self._parts[0]
        head, payload = PREFIX.unpack(prefix)
        if head + payload > self.limit:
            raise FrameFormatError(
                f"a frame of {head + payload} bytes, more than {self.limit}", bytes(prefix)
            )
        self._parts += [bytearray(min(head, FIRST)), bytearray(min(payload, FIRST))]
        self._sizes += [head, payload]
