"""`StoreServer`: the server of TCP stores. One thread, one selector, no polling.

A `get` or `wait` for keys that do not exist is parked with its peer, and answered when the keys appear or its
time is over. Every connection is a `ClientConnection` with at most one request under way. The server reads no
further before the answer is sent, so a peer takes the memory of at most one frame in and one out.

Unauthenticated peers (see `authenticator`) are limited in number, bytes and time; one that sends anything
else is dropped without an answer. See `wire` for the protocol.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import threading
import time

from unisono.engine.base import timeouts
from unisono.engine.base.closing import Closing
from unisono.engine.base.limits import is_limit, limit_errors
from unisono.engine.base.timeouts import LONGEST_S, seconds
from unisono.engine.base.validation import flag, instance, text, whole
from unisono.engine.store import wire
from unisono.engine.store.address import address_text, listen
from unisono.engine.store.authenticator import PATIENCE_S, AdmissionPolicy, Authenticator
from unisono.engine.store.base import close_in_children
from unisono.engine.store.client_connection import ClientConnection
from unisono.engine.store.operations import KeyValueTable, Op, Reply, Value
from unisono.errors import StoreError

ACCEPT_BATCH = 64
READ_BUDGET = 8  # pieces of wire.CHUNK read from one peer before the next peer's turn
FULL_PAUSE_S = 0.1  # before accepting again when the process is out of descriptors


class StoreServer(Closing):
    """Serves a table of keys and values on one address until closed. Starts in the constructor.

    Args:
        host: the only address on which it listens (of a name, the first address that can be bound).
        port: 0 picks a free one; see the attribute `port`.
        job: clients of another job are refused.
        token: clients must prove that they have the same token; empty: no proof.
        tls: encrypt every connection with keys made from the token.
        max_frame_bytes: the largest request or value that is accepted.
        hello_timeout_s: seconds for a peer to authenticate itself.
        max_unauthenticated: unauthenticated peers at one time; more wait in the kernel's queue.

    Raises:
        StoreError: the address cannot be bound; `errno` of its `__cause__` says why.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        job: str = "",
        token: bytes = b"",
        tls: bool = False,
        max_frame_bytes: int = 1 << 30,
        hello_timeout_s: float = 2.0,
        max_unauthenticated: int = 256,
    ) -> None:
        admission = Authenticator(
            AdmissionPolicy(
                text(job, "job"),
                bytes(instance(token, (bytes, bytearray), "token")),
                flag(tls, "tls"),
                whole(max_frame_bytes, "max_frame_bytes", 1, 1 << 62),
                timeouts.seconds(hello_timeout_s, name="hello_timeout_s"),
                whole(max_unauthenticated, "max_unauthenticated", 1),
            )
        )
        listener = listen(host, port)
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self._pid = os.getpid()
        try:
            with limit_errors(StoreError, f"cannot serve a store on {address_text(self.host, self.port)}"):
                self._loop = _ServerLoop(listener, admission)
                name = f"unisono-store-{self.port}"
                self._thread = threading.Thread(target=self._loop.run, name=name, daemon=True)
                self._thread.start()
        except BaseException:
            listener.close()
            raise
        close_in_children(self._forget)

    def close(self, linger_s: float = 0.0, world_size: int | None = None) -> None:
        """Stop serving, and free the port.

        With `linger_s` it first waits, at most that long, until every client has left. With `world_size` it
        waits only until the first `world_size` clients have joined and left: later ones belong to the next
        world.
        """
        if os.getpid() != self._pid:
            return
        try:
            linger_s = seconds(linger_s, name="linger_s", or_none=True)
            self._loop.stop(time.monotonic() + linger_s, world_size or 0)
            self._thread.join()
        except BaseException:  # Ctrl-C: do not wait any longer
            self._loop.stop(0.0, 0)
            self._thread.join(1.0)
            raise

    @property
    def limit(self) -> OSError | None:
        """The error of a limit that prevented accepting a connection, if any."""
        return self._loop.limit

    def has(self, client: str) -> bool:
        """Whether a client of this name is connected: its process, or its host's kernel, has not ended it."""
        return self._loop.has(client)

    def _forget(self) -> None:
        self._loop.close_descriptors()

    def __repr__(self) -> str:
        return f"<StoreServer {self.host}:{self.port}{'' if self._thread.is_alive() else ' closed'}>"


class _ServerLoop:
    """The server's thread. Only `run` uses its state, except for the stop request."""

    def __init__(self, listener: socket.socket, admission: Authenticator) -> None:
        self._listener = listener
        self._admission = admission
        self._rules = admission.rules
        self._table = KeyValueTable()
        self._peers: set[ClientConnection] = set()
        self._unauthenticated: dict[ClientConnection, float] = {}  # connected since; the oldest first
        self._clients_seen: dict[str, None] = {}  # in order of arrival
        self._waiters: dict[str, set[ClientConnection]] = {}
        self._alarms: list[tuple[float, int, ClientConnection]] = []
        self._alarm_count = 0
        self.limit: OSError | None = None
        self._accepting = True
        self._accept_after = 0.0
        self._stop_at: float | None = None
        self._stop_world = 0
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    def stop(self, deadline: float, world_size: int) -> None:
        """Ask `run` to end by `deadline`; called from other threads."""
        self._stop_world = world_size
        self._stop_at = deadline
        with contextlib.suppress(OSError):  # already closed, or already full of wake-ups
            self._wake_in.send(b"x")

    def run(self) -> None:
        """Serve until stopped, then close everything."""
        try:
            while not self._finished():
                for key, events in self._selector.select(self._patience()):
                    self._dispatch(key.fileobj, key.data, events)
                self._ring_alarms()
        finally:
            self._selector.close()
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close every descriptor and nothing else; a forked child calls it, too."""
        for peer in list(self._peers):
            peer.sock.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()
        self._selector.close()

    def has(self, client: str) -> bool:
        """See `StoreServer.has`; called from other threads."""
        return any(peer.client == client for peer in list(self._peers))

    # When to stop, how long to sleep.

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        return self._everybody_left() or time.monotonic() >= self._stop_at

    def _everybody_left(self) -> bool:
        """Whether the first `_stop_world` clients (0: all) have joined and left."""
        seen = list(self._clients_seen)
        expected = set(seen[: self._stop_world or None])
        return len(seen) >= self._stop_world and not any(peer.client in expected for peer in self._peers)

    def _patience(self) -> float | None:
        """Seconds until the next action that does not depend on an arrival."""
        moments = [self._alarms[0][0]] if self._alarms else []
        if self._stop_at is not None:
            moments.append(self._stop_at)
        if self._accept_after:
            moments.append(self._accept_after)
        left = min(moments) - time.monotonic() if moments else None
        return left if left is None else min(max(0.0, left), LONGEST_S)

    def _set_alarm(self, peer: ClientConnection, when: float) -> None:
        peer.deadline = when
        self._alarm_count += 1
        heapq.heappush(self._alarms, (when, self._alarm_count, peer))
        if len(self._alarms) > 2 * len(self._peers) + 64:  # drop alarms of ended waits
            self._alarms = [alarm for alarm in self._alarms if alarm[2].deadline == alarm[0]]
            heapq.heapify(self._alarms)

    def _ring_alarms(self) -> None:
        now = time.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            when, _, peer = heapq.heappop(self._alarms)
            if peer.deadline != when or peer not in self._peers:
                continue
            if peer.parked is None:
                self._drop(peer)  # no Hello in time
            else:
                missing = self._table.missing(peer.parked)
                self._unpark(peer)
                self._answer(peer, Reply(missing=missing))
        self._control_accepting(now)

    # Connections.

    def _dispatch(self, source: object, peer: ClientConnection | None, events: int) -> None:
        if source is self._listener:
            self._accept()
        elif peer is None:
            self._wake_out.recv(4096)
        elif peer in self._peers:
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(peer)
                else:
                    self._read(peer)
            except (OSError, EOFError, MemoryError, wire.FrameFormatError):
                self._drop(peer)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BATCH):
            if not self._room_for_a_peer():
                break
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if is_limit(error):
                    self.limit = error
                    self._accept_after = time.monotonic() + FULL_PAUSE_S
                    break
                continue  # this connection has already ended
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer = ClientConnection(sock, 0.0)
            self._peers.add(peer)
            self._unauthenticated[peer] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._set_alarm(peer, time.monotonic() + self._rules.hello_timeout_s)
        self._control_accepting(time.monotonic())

    def _room_for_a_peer(self) -> bool:
        """Whether another peer may connect; for it the oldest one is dropped, if it had enough time."""
        if len(self._unauthenticated) < self._rules.max_unauthenticated:
            return True
        oldest, since = next(iter(self._unauthenticated.items()))
        if time.monotonic() - since >= PATIENCE_S:
            self._drop(oldest)
            return True
        self._accept_after = since + PATIENCE_S
        return False

    def _control_accepting(self, now: float) -> None:
        """Watch the listener only while there is room for an unauthenticated peer."""
        if self._accept_after and now >= self._accept_after:
            self._accept_after = 0.0
        wanted = not self._accept_after
        if wanted and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif not wanted and self._accepting:
            self._selector.unregister(self._listener)
        self._accepting = wanted

    def _drop(self, peer: ClientConnection) -> None:
        self._unpark(peer)
        self._peers.discard(peer)
        self._unauthenticated.pop(peer, None)
        self._selector.unregister(peer.sock)
        peer.sock.close()

    # Requests.

    def _read(self, peer: ClientConnection) -> None:
        for turn in itertools.count():
            if turn >= READ_BUDGET and not self._admission.has_deciphered(peer.sock):
                return
            try:
                received = peer.reader.advance(peer.sock)
            except BlockingIOError:
                return
            if peer.parked is not None:
                raise wire.FrameFormatError("a second request while the first one waits")
            if received is not None:
                self._handle(peer, *received)
                return

    def _handle(self, peer: ClientConnection, head: bytearray, payload: bytearray) -> None:
        if not peer.client:
            self._greet(peer, head)
            return
        request = wire.read_request(head)
        absent = self._table.missing(request.op)
        if absent and request.timeout_s > 0:
            self._park(peer, request.op, absent, request.timeout_s)
        elif absent:
            self._answer(peer, Reply(missing=absent))
        else:
            self._answer(peer, self._table.apply(request.op, payload))
            self._wake_waiters(request.op)

    def _greet(self, peer: ClientConnection, head: bytearray) -> None:
        """Answer an unauthenticated peer; it becomes a client when its greeting is complete."""
        answer = self._admission.answer(peer.caller, head, self._comes_too_late)
        peer.last = isinstance(answer, wire.Rejection)
        if peer.client:
            self._unauthenticated.pop(peer, None)
            self._clients_seen[peer.client] = None
            peer.deadline = None
            peer.reader.limit = self._rules.max_frame_bytes
            peer.secure_next = self._rules.tls
        self._queue(peer, wire.frame(answer))

    def _comes_too_late(self, client: str) -> bool:
        """Whether the job is ending and this is not one of its clients."""
        closing = self._stop_at is not None and len(self._clients_seen) >= self._stop_world
        return closing and client not in self._clients_seen

    # Waiting for keys.

    def _park(self, peer: ClientConnection, op: Op, absent: tuple[str, ...], timeout_s: float) -> None:
        peer.parked = op
        peer.absent = set(absent)
        for key in peer.absent:
            self._waiters.setdefault(key, set()).add(peer)
        self._set_alarm(peer, time.monotonic() + min(timeout_s, 1e9))

    def _unpark(self, peer: ClientConnection) -> None:
        for key in peer.absent:
            waiting = self._waiters.get(key, set())
            waiting.discard(peer)
            if not waiting:
                self._waiters.pop(key, None)
        peer.absent = set()
        peer.parked = None
        peer.deadline = None

    def _wake_waiters(self, changed: Op) -> None:
        """Answer the clients that waited for a key that `changed` may have set."""
        key = getattr(changed, "key", None)
        if key not in self._waiters or key not in self._table.values:
            return
        for peer in self._waiters.pop(key):
            peer.absent.discard(key)
            if peer.parked is None or peer.absent:
                continue
            op = peer.parked
            self._unpark(peer)
            self._answer(peer, self._table.apply(op) if not self._table.missing(op) else Reply(number=1))

    # Answers.

    def _answer(self, peer: ClientConnection, reply: Reply) -> None:
        self._queue(peer, wire.reply_frame(reply))

    def _queue(self, peer: ClientConnection, pieces: list[Value]) -> None:
        peer.out.extend(memoryview(piece) for piece in pieces)
        try:
            self._send(peer)
        except OSError:
            self._drop(peer)

    def _send(self, peer: ClientConnection) -> None:
        """Send what the kernel accepts; while bytes remain, wait for write events instead of read events."""
        for _ in range(READ_BUDGET):
            if not peer.out:
                break
            piece = peer.out.popleft()
            try:
                sent = peer.sock.send(piece[: 4 * wire.CHUNK])
            except BlockingIOError:
                sent = 0
            if sent < len(piece):
                peer.out.appendleft(piece[sent:])
            if sent == 0:
                break
        if peer.last and not peer.out:
            self._drop(peer)
            return
        if peer.secure_next and not peer.out:
            peer.secure_next = False
            peer.sock = self._admission.secured(peer.sock, peer.caller)
        wanted = selectors.EVENT_WRITE if peer.out else selectors.EVENT_READ
        if wanted != peer.events:
            peer.events = wanted
            self._selector.modify(peer.sock, wanted, peer)
