"""The TCP store's client: no server, another program, a dead or stopped server, and the end of the job."""

import contextlib
import gc
import http.server
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inside
from effort import HANG_S, judge_time
from launching import wait_until
from loops import each
from unisono.engine.store import NotOurServer, StoreServer, TCPStore, client_handshake, tcp_client
from unisono.errors import StoreError, StoreTimeout


def test_nobody_listens(port: int) -> None:
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=rf"no store server at 127\.0\.0\.1:{port} within 2 s.*refused"):
        TCPStore("127.0.0.1", port, timeout_s=2)
    judge_time(time.monotonic() - start, 10)


def test_a_server_that_comes_later_is_found(port: int) -> None:
    servers: list[StoreServer] = []
    timer = threading.Timer(0.3, lambda: servers.append(StoreServer("127.0.0.1", port)))
    timer.start()
    with TCPStore("127.0.0.1", port, timeout_s=HANG_S) as store:
        store.set("k", "v")
    timer.join()
    servers[0].close()


@contextlib.contextmanager
def program(answer: bytes | None) -> Iterator[int]:
    """Another program on a port: says `answer` to everyone and closes; None: says nothing."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve() -> None:
            with contextlib.ExitStack() as open_sockets:
                while not done.is_set():
                    with contextlib.suppress(TimeoutError):
                        sock, _ = listener.accept()
                        if answer is None:
                            open_sockets.enter_context(sock)
                            continue
                        sock.sendall(answer)
                        sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        done.set()
        thread.join()


@each("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 8, b"\x00\x00\x00\x03\x00\x00\x00\x00abc", b""])
def test_another_program_is_told_at_once(answer: bytes) -> None:
    with program(answer) as port:
        start = time.monotonic()
        with pytest.raises(NotOurServer, match=rf"no Unisono store, answers at 127\.0\.0\.1:{port}"):
            TCPStore("127.0.0.1", port, timeout_s=HANG_S)
        judge_time(time.monotonic() - start, 5)


def test_a_silent_program_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_handshake, "GREETING_S", 0.3)
    warned = pytest.warns(UserWarning, match=r"sent nothing for 0\.3.* s more")
    with program(None) as port, warned, pytest.raises(StoreTimeout, match="sent nothing for 1"):
        TCPStore("127.0.0.1", port, timeout_s=1)


def test_a_web_server_is_told_at_once() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        start = time.monotonic()
        try:
            with pytest.raises(NotOurServer, match="no Unisono store"):
                TCPStore("127.0.0.1", web.server_port, timeout_s=HANG_S)
        finally:
            web.shutdown()
            thread.join()
        judge_time(time.monotonic() - start, 4)


def test_an_unknown_name_is_told_at_once() -> None:
    with pytest.raises(StoreError, match="no-such-host.invalid:29500 is not usable"):
        TCPStore("no-such-host.invalid", 29500, timeout_s=HANG_S)


def test_another_job_is_refused() -> None:
    with StoreServer(job="a") as server:
        with pytest.raises(NotOurServer, match="job 'a', not to 'b'") as caught:
            TCPStore("127.0.0.1", server.port, job="b", timeout_s=HANG_S)
        assert caught.value.reason == "job"


SERVER = Path(__file__).parent / "programs" / "store_server.py"


@pytest.fixture
def server_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_a_killed_server_is_named(server_process: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server_process
    with TCPStore("127.0.0.1", port, timeout_s=HANG_S) as store:
        threading.Timer(0.2, process.kill).start()
        start = time.monotonic()
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port}.*process {process.pid}") as caught:
            store.get("never")
        assert not isinstance(caught.value, StoreTimeout)
        judge_time(time.monotonic() - start, 5)
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} is gone"):
            store.get("never")


def test_a_stopped_server_does_not_outlive_the_deadline(
    server_process: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server_process
    with TCPStore("127.0.0.1", port, timeout_s=HANG_S) as store:
        store.set("k", "v")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match=f"process {process.pid}.*is stopped"):
            store.get("k", timeout_s=0.2)
        judge_time(time.monotonic() - start, 5)
        process.send_signal(signal.SIGCONT)
        assert store.get("k") == b"v"


def test_a_stopped_server_that_goes_on_has_lost_no_client(
    monkeypatch: pytest.MonkeyPatch, server_process: tuple[subprocess.Popen[str], int]
) -> None:
    """At the start of a job, and later: while a thread waits for a key, a call takes a second connection."""
    monkeypatch.setattr(client_handshake, "GREETING_S", 0.1)
    process, port = server_process
    with TCPStore("127.0.0.1", port, timeout_s=HANG_S) as first:
        waiting = threading.Thread(target=first.get, args=["k"])
        waiting.start()
        wait_until(lambda: not inside.idle(first))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        threading.Timer(1.0, process.send_signal, [signal.SIGCONT]).start()
        with pytest.warns(UserWarning, match="does not answer.*stopped or overloaded") as told:
            late = threading.Thread(target=lambda: TCPStore("127.0.0.1", port, timeout_s=HANG_S).close())
            late.start()
            first.set("k", "v")
            late.join()
            waiting.join()
        assert len(told) == 2
        assert first.get("k") == b"v"


@pytest.mark.parametrize("token", [b"", b"t" * 32])
def test_another_server_on_the_same_port_is_not_written_into(port: int, token: bytes) -> None:
    """A job started anew where the old one's clients are still alive: its store is none of theirs."""
    with StoreServer("127.0.0.1", port):
        store = TCPStore("127.0.0.1", port, timeout_s=HANG_S)
        store.set("k", "old")
    with store, StoreServer("127.0.0.1", port, token=token) as new:
        with pytest.raises(StoreError, match="closed the connection|reset"):
            store.set("k", "late")  # on the connection to the old one
        with pytest.raises(StoreError, match=r"gone: another one answers there.*start it anew"):
            store.set("k", "late")
        assert not inside.clients_seen(new)  # nor does it count among those whom the new one waits for
        with TCPStore("127.0.0.1", port, timeout_s=HANG_S, token=token) as fresh:
            assert len(fresh) == 0


class Clock:
    """`time.monotonic`, which a test sets forward: the process was stopped for so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead_s)


def test_connecting_takes_its_time_from_that_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server would answer later than the client listens, and seem to be stopped."""
    monkeypatch.setattr(tcp_client, "GRACE_S", 20.0)
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store:
        take, clock = getattr(store, inside.TAKES_A_CONNECTION), Clock(monkeypatch)

        def slow(deadline: float) -> Any:
            clock.ahead_s = 39.9
            return take(deadline)

        monkeypatch.setattr(store, inside.TAKES_A_CONNECTION, slow)
        with pytest.raises(StoreTimeout, match="did not appear within 40 s"):
            store.get("never", timeout_s=40)


@pytest.mark.parametrize("token", [b"", b"t" * 32])
def test_a_client_stopped_in_its_greeting_takes_what_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    with StoreServer(token=token, hello_timeout_s=1000) as server:
        clock, receive = Clock(monkeypatch), client_handshake.receive

        def late(sock: socket.socket, *arguments: Any) -> tuple[bytearray, bytearray]:
            select.select([sock], [], [])
            clock.ahead_s += client_handshake.GREETING_S + 1
            return receive(sock, *arguments)

        monkeypatch.setattr(client_handshake, "receive", late)
        with TCPStore("127.0.0.1", server.port, timeout_s=HANG_S, token=token) as store:
            assert store.timeout_s == HANG_S


# Closing.


def test_close_waits_for_the_others_and_turns_new_ones_away() -> None:
    store = TCPStore("127.0.0.1", 0, is_server=True, linger_s=HANG_S)
    other = TCPStore("127.0.0.1", store.port)
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_until(lambda: inside.is_ending(store))
    other.set("still", "served")
    with pytest.raises(StoreError, match="ending"):
        TCPStore("127.0.0.1", store.port, timeout_s=HANG_S, retry=False)
    start = time.monotonic()
    other.close()
    closing.join()
    judge_time(time.monotonic() - start, 5)


def test_close_waits_no_longer_than_told() -> None:
    store = TCPStore("127.0.0.1", 0, is_server=True, linger_s=0.2)
    with TCPStore("127.0.0.1", store.port) as other:
        start = time.monotonic()
        store.close()
        assert time.monotonic() - start > 0.15
        with pytest.raises(StoreError):
            other.set("k", "v")


def test_close_waits_for_those_still_to_come() -> None:
    store = TCPStore("127.0.0.1", 0, is_server=True, linger_s=HANG_S, world_size=2)
    store.set("k", "v")
    closing = threading.Thread(target=store.close)
    closing.start()
    time.sleep(0.1)
    with TCPStore("127.0.0.1", store.port, timeout_s=HANG_S) as late:
        assert late.get("k") == b"v"
    start = time.monotonic()
    closing.join()
    judge_time(time.monotonic() - start, 5)


def serve_soon(port: int) -> None:
    """Serve on `port` once; an orphan that has not yet had a moment on a core is given some."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            StoreServer("127.0.0.1", port).close()
            return
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_one_function_runs_at_a_fork_for_all_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps such a function until the process ends."""
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: registered.append(functions))
    gc.collect()
    before = len(inside.called_in_children())
    with StoreServer("127.0.0.1", 0) as server:
        clients = [TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) for _ in range(3)]
        assert len(inside.called_in_children()) == before + 4
        for client in clients:
            client.close()
    del clients, client, server
    gc.collect()
    assert len(inside.called_in_children()) == before
    assert not registered


def test_an_orphan_does_not_keep_the_port() -> None:
    with subprocess.Popen(
        [sys.executable, str(SERVER), "fork"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port, orphan = int(process.stdout.readline()), int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            serve_soon(port)
        finally:
            os.kill(orphan, signal.SIGKILL)
