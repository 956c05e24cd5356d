"""TLS for the engine's connections: a relay process beside the rank that encrypts all bytes.

The engine uses plain sockets, and many kernels have no TLS. So the rank makes a socket pair and gives one end
to the engine. This process gets the other end and the connection, and speaks TLS 1.3 on the connection. It
forwards the end of either side to the other, in order, so a death is detected as without TLS. The price is a
copy through a socket and the work of one core at each end.

The process ends with its last connection. It is a grandchild, so the program need not reap it. When the rank
has ended, the process closes a connection whose peer does not read, as the kernel does without TLS.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time

from unisono.engine.base.authentication import check_for_tls
from unisono.engine.base.timeouts import LONGEST_S
from unisono.engine.store.tls import context, wrap_socket
from unisono.errors import message

PIECE = 256 * 1024
LINGER = 6  # times the timeout for silent hosts: a peer's time to read after the rank has ended
SERVER, CLIENT = b"s", b"c"
START_S = 60.0  # for the process to start
ANSWER_S = 10.0  # for the process to answer
ROUNDS = 32  # reads or sends of one connection before the turn of the others and of new ones
TAKEN = b"taken"
# As python -P -m, which Python 3.10 does not have: no module comes from the working directory.
PROGRAM = """import sys
sys.path[:] = filter(None, sys.path)
from unisono.engine.bootstrap.tls_relay import main
main()"""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class TlsRelay:
    """Starts the process when it is first needed, and passes it connections. Used by several threads."""

    def __init__(self, token: bytes, peer_timeout_s: float) -> None:
        """Raises ValueError without a token."""
        check_for_tls(token)
        self._token = token
        self._peer_timeout_s = peer_timeout_s
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def carry(self, sock: socket.socket, *, server: bool, channel: str) -> socket.socket:
        """The engine's end of a connection that is encrypted from now on. The process takes over `sock`.

        Raises:
            OSError: the process does not start, has ended, or cannot take another one; the text says which.
        """
        own_end, relay_end = socket.socketpair()
        own_end.setblocking(False)
        try:
            with sock, relay_end, self._lock:
                introduction = (SERVER if server else CLIENT) + channel.encode()
                _check(self._hand_over(introduction, [sock.fileno(), relay_end.fileno()]))
        except BaseException:
            own_end.close()
            raise
        return own_end

    def _hand_over(self, introduction: bytes, descriptors: list[int]) -> bytes:
        """Pass a connection to the process, and return its answer. Called with the lock held."""
        control = self._control = self._control or _start(self._token, self._peer_timeout_s)
        try:
            control.settimeout(ANSWER_S)
            socket.send_fds(control, [introduction], descriptors)
            return control.recv(4096)
        except BaseException:  # the answer may arrive later, and must not count for another connection
            self._control = None
            control.close()
            raise

    def close(self) -> None:
        """Stop passing connections; the process ends with its last one."""
        if self._control is not None:
            self._control.close()


def _check(answer: bytes) -> None:
    if answer != TAKEN:
        raise ChildProcessError(answer.decode() or "the process that encrypts connections has ended")


def _start(token: bytes, peer_timeout_s: float) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.fileno()
    command = [sys.executable, "-c", PROGRAM, str(fd), str(peer_timeout_s)]
    try:
        ours.settimeout(START_S)
        with theirs:
            ours.send(token)
            subprocess.run(command, pass_fds=[fd], stdin=subprocess.DEVNULL, check=True, timeout=START_S)
    except subprocess.SubprocessError as error:
        ours.close()
        raise ChildProcessError(str(error)) from error
    except BaseException:
        ours.close()
        raise
    return ours


class RelayDirection:
    """One direction: bytes read from `source` and not yet sent to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        self._buffer = memoryview(bytearray(PIECE))
        self._first = self._last = 0
        self.over = False

    def full(self) -> bool:
        """Whether it waits for the sink, and not for the source."""
        return self._first < self._last

    def move(self) -> bool:
        """Read or send once; returns whether bytes moved. Raises OSError when one of the two is gone."""
        if self.over:
            return False
        try:
            if self.full():
                self._first += self._send()
                return True
            self._first, self._last = 0, self._source.recv_into(self._buffer)
            if not self._last:
                self.over = True
                with contextlib.suppress(BrokenPipeError):
                    socket.socket.shutdown(self._sink, socket.SHUT_WR)  # an SSLSocket's own forgets its keys
        except BlockingIOError:
            return False
        return True

    def _send(self) -> int:
        """Send; returns the number of bytes that were accepted.

        Bytes to a rank that has ended are read and dropped: closing a connection with unread bytes resets it,
        and bytes in the other direction may be lost.
        """
        try:
            return self._sink.send(self._buffer[self._first : self._last])
        except BrokenPipeError:
            if isinstance(self._sink, ssl.SSLSocket):
                raise
            return self._last - self._first


class RelayConnection:
    """One connection: TLS outside, plain inside."""

    def __init__(self, outer: socket.socket, inner: socket.socket) -> None:
        self.outer, self.inner = outer, inner
        self.closed = False
        self._outwards, self._inwards = RelayDirection(inner, outer), RelayDirection(outer, inner)

    def events(self) -> tuple[int, int]:
        """The events to wait for on `outer` and on `inner`."""
        return (
            _poll_events(self._inwards, READ, full=False) | _poll_events(self._outwards, WRITE, full=True),
            _poll_events(self._outwards, READ, full=False) | _poll_events(self._inwards, WRITE, full=True),
        )

    def move(self) -> None:
        """Forward bytes without waiting, at most ROUNDS times.

        A selector reports further bytes: a read takes a whole TLS record, so none stays in the library.
        """
        try:
            for _ in range(ROUNDS):
                if not self._outwards.move() | self._inwards.move():
                    break
            if self._outwards.over and self._inwards.over:
                self.close()
        except OSError:  # one side is gone: end the other, too
            self.close()

    def limit(self, peer_timeout_s: float) -> None:
        """If the rank has ended, limit the time in which its peer has to read the remaining bytes.

        The rank's end may not have been read yet: it comes after bytes that the peer does not read.
        """
        hung_up = select.poll()
        hung_up.register(self.inner, 0)
        if hung_up.poll(0):
            milliseconds = max(1, round(1000 * min(LINGER * peer_timeout_s, LONGEST_S)))
            self.outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def close(self) -> None:
        """End both sides."""
        self.closed = True
        self.inner.close()
        self.outer.close()


def _poll_events(flow: RelayDirection, event: int, *, full: bool) -> int:
    return event if not flow.over and flow.full() == full else 0


def serve(control: socket.socket, peer_timeout_s: float) -> None:
    """Serve connections until there are none, and no rank can pass another one."""
    token = control.recv(4096)
    contexts = {SERVER: context(token, server=True), CLIENT: context(token, server=False)}
    looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(control, READ)
        while selector.get_map():
            found = selector.select(peer_timeout_s)
            for one in {key.fileobj if key.data is None else key.data for key, _ in found}:
                if isinstance(one, RelayConnection):
                    _advance(selector, one)
                elif not _admit(selector, control, contexts):
                    selector.unregister(control)
            if time.monotonic() - looked >= peer_timeout_s:
                looked = time.monotonic()
                for pair in {key.data for key in selector.get_map().values() if key.data is not None}:
                    pair.limit(peer_timeout_s)


def _advance(selector: selectors.BaseSelector, pair: RelayConnection) -> None:
    for sock in (pair.outer, pair.inner):
        with contextlib.suppress(KeyError):
            selector.unregister(sock)
    pair.move()
    if not pair.closed:
        for sock, events in zip((pair.outer, pair.inner), pair.events(), strict=True):
            if events:
                selector.register(sock, events, pair)


def _admit(
    selector: selectors.BaseSelector, control: socket.socket, contexts: dict[bytes, ssl.SSLContext]
) -> bool:
    """Accept a connection from the rank, and answer. False when the rank passes no more."""
    try:
        introduction, descriptors, flags, _ = socket.recv_fds(control, 256, 2)
    except ConnectionError:  # the rank has ended before the answer
        return False
    if not introduction:
        return False
    pair, answer = None, TAKEN
    try:
        pair = _pair(introduction, descriptors, flags, contexts)
    except OSError as error:  # of this connection: the others continue
        answer = str(error).encode()
    with contextlib.suppress(OSError):  # the rank may have ended
        control.send(answer)
    if pair:
        _advance(selector, pair)
    return True


def _pair(
    introduction: bytes, descriptors: list[int], flags: int, contexts: dict[bytes, ssl.SSLContext]
) -> RelayConnection:
    """The connection that was introduced. Raises OSError when its descriptors did not all arrive."""
    if flags & socket.MSG_CTRUNC:
        for each in descriptors:
            os.close(each)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        what = "the process that encrypts connections cannot open as many files as they need, two for each"
        remedy = f"It may open {limit}: raise the hard limit, ulimit -Hn."
        raise OSError(message(what, observed=f"{len(descriptors)} of 2", remedy=remedy))
    outer, inner = (socket.socket(fileno=each) for each in descriptors)
    for sock in (outer, inner):
        sock.setblocking(False)
    side, channel = introduction[:1], introduction[1:].decode()
    try:
        return RelayConnection(
            wrap_socket(outer, contexts[side], server=side == SERVER, channel=channel), inner
        )
    except OSError:
        inner.close()
        outer.close()
        raise


def _open_many_files() -> None:
    """Raise the limit of open files to the maximum: 170 ranks on other hosts take a thousand files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # above the system's limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serve in the background. Arguments: the descriptor that passes connections, the timeout for hosts."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)  # a reader of the rank's output must not wait for this process
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    _open_many_files()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, float(sys.argv[2]))
