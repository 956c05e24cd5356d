"""A store with a token among those who do not have it."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S, judge_time
from loops import each
from unisono.engine.base import authentication
from unisono.engine.store import StoreServer, TCPStore, tls, wire
from unisono.errors import AuthenticationError

TOKEN = authentication.make_token()
OTHER = authentication.make_token()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(token=TOKEN) as found:
        yield found


def opened(server: StoreServer, **options: Any) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, timeout_s=HANG_S, **options)


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=HANG_S)


def is_dropped(sock: socket.socket) -> bool:
    """Whether the peer closes; what it says before is skipped."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@each("given", [{}, {"token": OTHER}, {"token": TOKEN, "tls": True}])
def test_a_client_without_the_token_is_refused(server: StoreServer, given: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationError, match="UNISONO_T"):
        opened(server, **given)
    with opened(server, token=TOKEN) as store:
        store.set("k", "v")


def test_a_server_without_the_token_is_refused() -> None:
    with StoreServer() as server, pytest.raises(AuthenticationError, match="it has no token"):
        opened(server, token=TOKEN)


def test_a_server_that_asks_for_no_proof_is_refused() -> None:
    """What stands in for the store and just lets everybody in, to read what they write."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                welcome = wire.ServerWelcome(wire.MAGIC, wire.VERSION, 1 << 20, "h", 1, "id")
                sock.sendall(b"".join(wire.frame(welcome)))
                is_dropped(sock)

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AuthenticationError, match="let us in without a proof"):
            TCPStore("127.0.0.1", listener.getsockname()[1], timeout_s=HANG_S, token=TOKEN)
        thread.join()


def test_lists_in_lists_do_not_end_the_server(server: StoreServer) -> None:
    """What follows the fields of a Hello is skipped: a RecursionError there ended the server."""
    (hello,) = wire.frame(wire.ClientHello(wire.MAGIC, wire.VERSION, "", "c"))
    head = bytes([hello[wire.PREFIX.size] + 1]) + hello[wire.PREFIX.size + 1 :] + b"\x91" * 3000 + b"\0"
    with raw(server) as sock:
        sock.sendall(wire.PREFIX.pack(len(head), 0) + head)
        assert is_dropped(sock)
    with opened(server, token=TOKEN) as store:
        store.set("k", "v")


def test_tls_needs_a_token_and_hides_what_is_said() -> None:
    with pytest.raises(ValueError, match="TLS needs the job's token"):
        StoreServer(tls=True)
    with StoreServer(token=TOKEN, tls=True) as server:
        with pytest.raises(AuthenticationError, match="TLS is on there and not here"):
            opened(server, token=TOKEN)
        seen = _overheard(server.port, {"token": TOKEN, "tls": True})
    assert b"UNISONO STORE" in seen and b"a very secret value" not in seen
    with StoreServer(token=TOKEN) as server:
        assert b"a very secret value" in _overheard(server.port, {"token": TOKEN})


def _overheard(port: int, options: dict[str, Any]) -> bytes:
    """Every byte a client sent through somebody in the middle."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def pass_on() -> None:
            near, _ = middle.accept()
            far = socket.create_connection(("127.0.0.1", port))
            back = threading.Thread(target=_copy, args=(far, near, bytearray()))
            back.start()
            _copy(near, far, seen)
            back.join()
            near.close()
            far.close()

        thread = threading.Thread(target=pass_on)
        thread.start()
        with TCPStore("127.0.0.1", middle.getsockname()[1], timeout_s=HANG_S, **options) as store:
            store.set("k", b"a very secret value" * 50_000)
            assert store.get("k") == b"a very secret value" * 50_000
        thread.join()
    return bytes(seen)


def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            seen += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def test_the_certificate_is_of_the_token_alone() -> None:
    assert tls.certificate(TOKEN) == tls.certificate(TOKEN)
    assert tls.certificate(TOKEN)[0] != tls.certificate(OTHER)[0]


def test_a_replayed_hello_and_proof_do_not_open(server: StoreServer) -> None:
    said = b""
    with opened(server, token=TOKEN) as store:  # an honest client, as one who listens would have it
        assert len(store) == 0
    me = wire.ClientHello(wire.MAGIC, wire.VERSION, "", "me", nonce=authentication.fresh_nonce())
    with raw(server) as sock:
        said = _proven(sock, me)
    with raw(server) as sock:
        sock.sendall(said)
        reader = wire.FrameReader(4096)
        _next(sock, reader)  # a challenge of its own
        answer = wire.read_greeting(_next(sock, reader))
        assert isinstance(answer, wire.Rejection) and answer.reason == "token"
        assert is_dropped(sock)


def _proven(sock: socket.socket, me: wire.ClientHello) -> bytes:
    """Get in with the token; everything that was sent for it."""
    from unisono.engine.store.authenticator import store_proof

    hello = b"".join(wire.frame(me))
    sock.sendall(hello)
    reader = wire.FrameReader(4096)
    challenge = wire.read_greeting(_next(sock, reader))
    assert isinstance(challenge, wire.ServerChallenge)
    proof = b"".join(wire.frame(wire.TokenProof(store_proof(TOKEN, "connect", me, challenge.nonce))))
    sock.sendall(proof)
    assert isinstance(wire.read_greeting(_next(sock, reader)), wire.ServerWelcome)
    return hello + proof


def _next(sock: socket.socket, reader: wire.FrameReader) -> bytearray:
    while (received := reader.advance(sock)) is None:
        pass
    return received[0]


def test_a_scanner_costs_little_and_disturbs_nobody(server: StoreServer) -> None:
    """Random bytes, half-open handshakes, huge lengths and silence, while a client works."""
    with opened(server, token=TOKEN) as store, contextlib.ExitStack() as stack:
        store.set("k", b"v")
        before = _resident()
        chance = random.Random(1)
        hello = b"".join(wire.frame(wire.ClientHello(wire.MAGIC, wire.VERSION, "", "x", nonce=bytes(32))))
        times = []
        for number in range(400):
            sock = stack.enter_context(raw(server))
            said = [chance.randbytes(chance.randrange(1, 4096)), hello, b"\xff" * 8, b"", hello[:20]][
                number % 5
            ]
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
            start = time.monotonic()
            assert store.get("k") == b"v"
            times.append(time.monotonic() - start)
        with opened(server, token=TOKEN) as newcomer:
            assert newcomer.get("k") == b"v"
        grown = _resident() - before
    # ASan keeps freed memory back for a while.
    assert grown < (100 << 20 if "UNISONO_SANITIZED" in os.environ else 10 << 20), grown
    judge_time(sorted(times)[-3], 2.0)  # the machine may stop us now and then


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
