"""The TCP store's server among strangers, stalls and crowds."""

import contextlib
import os
import resource
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import inside
from effort import HANG_S
from ports import reserved
from unisono.engine.group.external_init import mpi_rendezvous
from unisono.engine.store import StoreServer, TCPStore, operations, wire
from unisono.engine.store.address import listen, reserve
from unisono.errors import StoreError

HELLO = wire.ClientHello(wire.MAGIC, wire.VERSION, "", "me")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(hello_timeout_s=30.0) as found:
        yield found


@pytest.fixture
def client(server: StoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) as found:
        yield found


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=HANG_S)


def greet(sock: socket.socket, hello: wire.ClientHello) -> wire.Greeting:
    """Say Hello; what the server answers."""
    sock.sendall(b"".join(wire.frame(hello)))
    reader = wire.FrameReader(4096)
    while (received := reader.advance(sock)) is None:
        pass
    return wire.read_greeting(received[0])


def greeted(server: StoreServer) -> socket.socket:
    """A connection that said Hello and got its Welcome, in the hands of a test."""
    sock = raw(server)
    assert isinstance(greet(sock, HELLO), wire.ServerWelcome)
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    """Whether the peer closes within the socket's timeout, having said nothing."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


# Where it listens.


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.3", "127.0.0.3")]
)
def test_listens_on_the_given_address_only(host: str, expected: str) -> None:
    with reserved() as port, StoreServer(host, port) as server:  # nobody else's server has that port
        assert server.host == expected
        elsewhere = "127.0.0.2" if ":" not in host else "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, server.port), timeout=1)
        with TCPStore(host, server.port, timeout_s=HANG_S) as store:
            store.set("k", "v")


def test_localhost_is_loopback() -> None:
    with TCPStore("localhost", 0, is_server=True) as store:
        assert store.host in ("127.0.0.1", "::1")
        with TCPStore("localhost", store.port, timeout_s=HANG_S) as other:
            other.set("k", "v")
        assert store.get("k") == b"v"


def test_a_taken_port_is_named(server: StoreServer) -> None:
    with pytest.raises(
        StoreError, match=rf"127\.0\.0\.1:{server.port}: Address already in use.* choose another"
    ):
        TCPStore("127.0.0.1", server.port, is_server=True)


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(StoreError, match=r"192\.0\.2\.1:0: Cannot assign.*rank 0 has to run on the master"):
        StoreServer("192.0.2.1")


def test_the_port_is_free_again_at_once() -> None:
    with reserved() as port:
        for _ in range(5):
            with TCPStore("127.0.0.1", port, is_server=True), TCPStore("127.0.0.1", port) as other:
                other.set("k", "v")


# Strangers.


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 8,
    b"\xff" * 64,
    b"\x00\x00\x00\x05\x00\x00\x00\x00hello",
    wire.PREFIX.pack(5000, 0),
    b"".join(wire.frame(wire.ClientHello("someone else", 1, "", "me"))),
    b"".join(wire.frame(wire.StoreRequest(operations.Set("k"), 1.0), b"v")),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_before_hello_is_dropped(server: StoreServer, client: TCPStore, garbage: bytes) -> None:
    with raw(server) as sock:
        sock.sendall(garbage)
        assert is_closed_by_peer(sock)
    assert client.num_keys() == 0


@given(garbage=st.binary(min_size=1, max_size=300), after_hello=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_leave_the_server_undisturbed(
    server: StoreServer, client: TCPStore, garbage: bytes, after_hello: bool
) -> None:
    with greeted(server) if after_hello else raw(server) as sock, contextlib.suppress(OSError):
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)  # an OSError when the server hung up already
        while sock.recv(4096):
            pass
    assert client.add("alive", 1) > 0


def test_a_flood_before_hello_is_cut_short(server: StoreServer, client: TCPStore) -> None:
    with raw(server) as sock:
        sent = 0
        with pytest.raises(OSError, match="reset|pipe"):
            while sent < 1 << 30:
                sent += sock.send(b"x" * 65536)
    assert sent < 64 << 20
    client.set("k", "v")


def test_a_silent_stranger_is_dropped_in_time() -> None:
    start = time.monotonic()
    with StoreServer(hello_timeout_s=1.0) as server, raw(server) as sock:
        sock.sendall(b"\x00")
        assert is_closed_by_peer(sock)
    assert time.monotonic() - start > 0.5


def test_more_strangers_than_allowed_delay_but_do_not_stop_clients() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StoreServer(hello_timeout_s=0.3, max_unauthenticated=4))
        for _ in range(20):
            stack.enter_context(raw(server))
        store = stack.enter_context(TCPStore("127.0.0.1", server.port, timeout_s=HANG_S))
        store.set("k", "v")


def test_running_out_of_descriptors_is_survived(server: StoreServer, client: TCPStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [raw(server) for _ in range(3)]
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    spare = [socket.socket() for _ in range(8)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    try:
        for sock in spare:
            sock.connect((server.host, server.port))
        client.set("k", "v")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in strangers + spare:
            sock.close()
    with TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) as other:
        assert other.get("k") == b"v"


def test_a_second_request_while_one_waits_is_dropped(server: StoreServer, client: TCPStore) -> None:
    with greeted(server) as sock:
        waiting = b"".join(wire.frame(wire.StoreRequest(operations.Get("never"), 100.0)))
        sock.sendall(waiting + waiting)
        assert is_closed_by_peer(sock)
    client.set("never", "v")


def test_another_version_is_refused(server: StoreServer) -> None:
    with raw(server) as sock:
        greeting = greet(sock, wire.ClientHello(wire.MAGIC, 0, "", "me"))
        assert isinstance(greeting, wire.Rejection)
        assert greeting.reason == "version"
        assert is_closed_by_peer(sock)


# Large values and stalls.


def test_a_half_sent_value_stalls_nobody(server: StoreServer, client: TCPStore) -> None:
    with greeted(server) as sock:
        head = wire.frame(wire.StoreRequest(operations.Set("big"), 1.0), b"x" * (1 << 20))[0]
        sock.sendall(bytes(head) + b"x" * 1000)
        for _ in range(50):
            client.add("n", 1, timeout_s=HANG_S)
    assert not client.check(["big"])


def test_a_client_that_does_not_read_stalls_nobody(server: StoreServer, client: TCPStore) -> None:
    client.set("big", b"x" * (32 << 20))
    with greeted(server) as sock:
        sock.sendall(b"".join(wire.frame(wire.StoreRequest(operations.Get("big"), 1.0))))
        time.sleep(0.1)
        for _ in range(50):
            client.add("n", 1, timeout_s=HANG_S)


def test_a_value_above_the_limit_is_refused_before_it_is_sent() -> None:
    with StoreServer(max_frame_bytes=10_000) as server, TCPStore("127.0.0.1", server.port) as store:
        store.set("fits", b"x" * 9_900)
        with pytest.raises(ValueError, match="too large.*at most 10000"):
            store.set("big", b"x" * 10_001)
        assert store.num_keys() == 1


def test_hundreds_of_clients_wait_at_once(server: StoreServer, client: TCPStore) -> None:
    arrived = threading.Semaphore(0)

    def wait() -> None:
        with TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) as store:
            store.add("came", 1)
            if store.get("go") == b"now":
                arrived.release()

    threads = [threading.Thread(target=wait) for _ in range(200)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while client.peek("came") != b"200" and time.monotonic() < deadline:
        time.sleep(0.05)
    client.set("go", "now")
    for thread in threads:
        thread.join()
    assert all(arrived.acquire(blocking=False) for _ in threads)


def test_waiting_costs_the_server_nothing(server: StoreServer, client: TCPStore) -> None:
    with greeted(server) as sock:
        sock.sendall(b"".join(wire.frame(wire.StoreRequest(operations.Get("never"), 100.0))))
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_alarms_of_finished_waits_are_forgotten(server: StoreServer, client: TCPStore) -> None:
    for number in range(300):
        timer = threading.Timer(0, client.set, (f"k{number}", ""))
        timer.start()
        client.get(f"k{number}", timeout_s=1000)
        timer.join()
    alarms, waiters = inside.waits_of(server)
    assert alarms < 100
    assert waiters == 0


def test_a_reserved_port_is_given_to_nobody_by_chance_and_can_be_listened_on() -> None:
    with reserve("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with listen("127.0.0.1", port) as listening:
            assert listening.getsockname()[1] == port


def test_rank_0_keeps_the_port_that_mpi_hands_out_until_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed before: another program could get it."""
    alone = types.SimpleNamespace(
        allgather=lambda host: [host], bcast=lambda offer: offer, Get_rank=lambda: 0, Get_size=lambda: 1
    )
    module = types.ModuleType("mpi4py.MPI")
    module.COMM_WORLD = alone  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    with mpi_rendezvous() as (url, _), socket.socket() as other:
        port = int(url.partition("?")[0].rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
