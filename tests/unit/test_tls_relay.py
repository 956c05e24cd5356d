"""The process that encrypts connections: how many it carries, what it refuses, and who has a turn."""

import contextlib
import gc
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import inside
from effort import HANG_S
from unisono.engine.base.authentication import make_token
from unisono.engine.bootstrap import tls_relay

NOFILE = resource.RLIMIT_NOFILE
TIMEOUT_S = 5.0


@contextlib.contextmanager
def soft_limit(files: int) -> Iterator[None]:
    """Let this process, and those it starts, open no descriptor from `files` on."""
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(NOFILE, (soft, hard))


def free(count: int) -> list[int]:
    """The next descriptors that this process will open."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.socket()).fileno() for _ in range(count)]


@contextlib.contextmanager
def relays_here() -> Iterator[tls_relay.TlsRelay]:
    """A relay that is a thread of this process, so that the limit of this process is the relay's."""
    token = make_token()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = tls_relay.TlsRelay(token, TIMEOUT_S)
    inside.set_relay_socket(made, ours)
    with ours, theirs:
        ours.settimeout(HANG_S)
        ours.send(token)
        thread = threading.Thread(target=tls_relay.serve, args=(theirs, TIMEOUT_S), daemon=True)
        thread.start()
        yield made
        made.close()
        thread.join(HANG_S)
        assert not thread.is_alive()


def joined(relays: tls_relay.TlsRelay) -> tuple[socket.socket, socket.socket]:
    """The plain ends of one connection, encrypted in between."""
    one, two = socket.socketpair()
    ends = relays.carry(one, server=True, channel="0"), relays.carry(two, server=False, channel="0")
    for end in ends:
        end.settimeout(HANG_S)
    return ends


def passes(source: socket.socket, sink: socket.socket, data: bytes) -> None:
    sender = threading.Thread(target=source.sendall, args=(data,), daemon=True)
    sender.start()
    got = bytearray()
    while len(got) < len(data):
        got += sink.recv(1 << 20)
    sender.join()
    assert got == data


@pytest.mark.parametrize("left", [0, 1])
def test_a_connection_too_many_is_refused_and_the_others_go_on(left: int):
    gc.collect()  # nothing else is to close a descriptor in the middle
    with relays_here() as relays, contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        one, two = (stack.enter_context(end) for end in joined(relays))
        passes(one, two, b"before")
        outer, other = (stack.enter_context(end) for end in socket.socketpair())
        # carry opens two, of which the relay is left `left`
        with soft_limit(free(3)[1 + left] + 1), pytest.raises(OSError, match=f"{left} of 2.*ulimit -Hn"):
            relays.carry(outer, server=True, channel="1")
        assert other.recv(1) == b""  # nothing of it stays open
        passes(two, one, b"after")
        for end in joined(relays):
            end.close()
        one.close()
        two.close()


def test_the_process_opens_as_many_files_as_it_may():
    """Started under a low soft limit, it carries twice that many: a connection is two files."""
    relays = tls_relay.TlsRelay(make_token(), TIMEOUT_S)
    few = free(20)[-1] + 1  # enough for starting it
    with contextlib.ExitStack() as stack:
        stack.callback(relays.close)
        for number in range(few):
            outer, other = socket.socketpair()
            stack.enter_context(other)
            with contextlib.nullcontext() if number else soft_limit(few):  # the first one starts it
                stack.enter_context(relays.carry(outer, server=True, channel="0"))


def test_the_process_takes_no_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in ("ssl", "unisono"):
        (tmp_path / f"{module}.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    relays = tls_relay.TlsRelay(make_token(), TIMEOUT_S)
    one, two = joined(relays)
    with one, two:
        passes(one, two, b"data")
    relays.close()
    assert not (tmp_path / "imported").exists()


def test_a_rank_that_ends_without_hearing_the_answer_leaves_its_connections():
    with relays_here() as relays, contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(end) for end in joined(relays))
        outer, _ = (stack.enter_context(end) for end in socket.socketpair())
        _, far = (stack.enter_context(end) for end in socket.socketpair())
        control = inside.relay_socket(relays)
        socket.send_fds(control, [tls_relay.SERVER + b"1"], [outer.fileno(), far.fileno()])
        assert control.recv(1, socket.MSG_PEEK)  # it has answered
        control.close()
        passes(one, two, b"after")


class Endless:
    """A socket that always has more, and always takes more."""

    def __init__(self) -> None:
        self.reads = 0

    def recv_into(self, buffer: memoryview) -> int:
        self.reads += 1
        if self.reads > 100_000:
            raise OSError("would go on for ever")
        return len(buffer)

    def send(self, data: memoryview) -> int:
        return len(data)

    def close(self) -> None:
        pass


def test_a_stream_that_never_ends_leaves_the_others_their_turn():
    outer, inner = Endless(), Endless()
    pair = tls_relay.RelayConnection(outer, inner)  # type: ignore[arg-type]
    pair.move()
    assert not pair.closed
    assert 0 < outer.reads <= tls_relay.ROUNDS


def test_what_is_left_after_a_turn_is_not_forgotten():
    """Many turns' worth, then silence: the TLS library holds back nothing that the selector cannot see."""
    with relays_here() as relays:
        one, two = joined(relays)
        with one, two:
            passes(one, two, bytes(range(256)) * 64 * 1024)
            passes(two, one, b"back")
