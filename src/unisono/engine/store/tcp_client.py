"""`TCPStore`: the client of a `StoreServer`, on this host or another one.

Each call under way has a connection of its own, from a small pool: a thread that waits for a key does not
block a thread that sets it. A connection whose call was interrupted (Ctrl-C, a missed deadline) is closed,
and the next call opens another one. The server has no state per connection, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from unisono.engine.base import authentication
from unisono.engine.base.limits import limit_errors, limit_text
from unisono.engine.base.timeouts import seconds
from unisono.engine.base.validation import flag, instance, text, whole
from unisono.engine.store import wire
from unisono.engine.store.address import address_text
from unisono.engine.store.base import Store, close_in_children
from unisono.engine.store.client_handshake import TRY_S, NotOurServer, StoreConnector, receive, send
from unisono.engine.store.operations import Get, Op, Reply, Wait
from unisono.errors import StoreError, StoreTimeout, message

if TYPE_CHECKING:
    from unisono.engine.store.tcp_server import StoreServer

__all__ = ["NotOurServer", "TCPStore"]

GRACE_S = 2.0  # how much later than the server the client ends a wait: the answer may be slow


class TCPStore(Store):
    """Client of the store server at `host:port`; with `is_server` it runs that server, too.

    The constructor connects, and keeps trying while nothing listens there, until `timeout_s`.

    Args:
        host: name or address; a server listens on that address only.
        port: 0 lets a server pick a free one; see the attribute `port`.
        world_size: how many clients `close()` of the server waits for before it may stop serving. A client of
            a server with many clients waits longer for its greeting.
        is_server: run the server in a thread of this process.
        timeout_s: seconds for connecting, and for a call without a timeout of its own.
        job: must be the same for client and server.
        token: each has to prove to the other that it has the same; empty: neither has one.
        tls: encrypt the connections; the token is needed, and the same on both sides.
        linger_s: seconds `close()` of the server waits, at most, for the other clients to leave.
        retry: keep trying while nothing listens; otherwise one attempt.

    Raises:
        StoreTimeout: no server in time; the text names the address and the last error.
        AuthenticationError: the server has another token, or one side has none.
        ValueError: TLS without a token.
        StoreError: the name does not resolve, another program answers, or the port cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        world_size: int | None = None,
        is_server: bool = False,
        timeout_s: float = 300.0,
        job: str = "",
        token: bytes = b"",
        tls: bool = False,
        linger_s: float = 5.0,
        retry: bool = True,
    ) -> None:
        super().__init__(timeout_s)
        host = text(host, "host")
        token = bytes(instance(token, (bytes, bytearray), "token"))
        if flag(tls, "tls"):
            authentication.check_for_tls(token)
        self._server = _serve(host, port, job, token, tls) if is_server else None
        self._world_size = None if world_size is None else whole(world_size, "world_size", 0)
        self._linger_s = seconds(linger_s, name="linger_s", or_none=True)
        self.host = self._server.host if self._server else host
        self.port = self._server.port if self._server else port
        self._name = os.urandom(8).hex()
        self._job = text(job, "job")
        self._token = token
        self._tls = tls
        self._served_by = ""  # the server's id, as soon as it is known
        self._lock = threading.RLock()
        self._idle: list[_StoreConnection] = []
        self._open: set[_StoreConnection] = set()
        close_in_children(self._forget)
        try:
            first = self._first(time.monotonic() + self._timeout_s, retry=retry)
            self.server_pid = first.welcome.pid  # on the server's host
            self._served_by = first.welcome.server
            self._give_back(first)
        except StoreError as error:  # the clients that came first may have taken the server's last descriptor
            limit = self.limit
            self.close(linger_s=0.0)
            if limit is None:
                raise
            raise StoreError(
                f"the server of {self.describe()} accepts no connections: {limit_text(limit)}"
            ) from error
        except BaseException:
            self.close(linger_s=0.0)
            raise

    @property
    def serves(self) -> bool:
        """Whether the server runs in this process."""
        return self._server is not None

    @property
    def limit(self) -> OSError | None:
        """The error of a limit for which the server in this process cannot accept more clients, if any."""
        return None if self._server is None else self._server.limit

    @property
    def name(self) -> str:
        """By which the server knows this client; see `StoreServer.has`."""
        return self._name

    def describe(self) -> str:
        return f"TCPStore {address_text(self.host, self.port)}"

    def close(self, linger_s: float | None = None, world_size: int | None = None) -> None:
        """Leave. The client that runs the server first waits briefly until the others have left.

        Args:
            linger_s: the most seconds of that wait, instead of the constructor's.
            world_size: how many clients to wait for, instead of the constructor's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        super().close()
        with self._lock:
            connections, self._open, self._idle = list(self._open), set(), []
        for connection in connections:
            connection.hang_up()
        if self._server is not None:
            self._server.close(
                self._linger_s if linger_s is None else linger_s, world_size or self._world_size
            )

    def _forget(self) -> None:
        for connection in list(self._open):
            connection.sock.close()

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        waits = isinstance(op, (Get, Wait)) or timeout_s == 0
        deadline = time.monotonic() + timeout_s + (GRACE_S if waits else 0.0)
        connection = self._take(deadline)
        try:
            reply = connection.ask(op, payload, timeout_s, deadline)
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection)
        return reply

    # The pool. The lock excludes other threads. A signal handler, or a finalizer that the garbage collector
    # runs, may call or close the store between any two lines below. So a call takes a connection by one
    # `pop`, and returns it before it checks whether the store is closed. No two calls share a connection.

    def _take(self, deadline: float) -> _StoreConnection:
        with self._lock, contextlib.suppress(IndexError):  # none is idle
            self._check_usable()
            return self._idle.pop()
        return self._connect(deadline, retry=False)

    def _give_back(self, connection: _StoreConnection) -> None:
        with self._lock:
            self._open.add(connection)
            self._idle.append(connection)
            if not self._closed:
                return
            self._idle.clear()
        self._drop(connection)

    def _drop(self, connection: _StoreConnection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.hang_up()

    def _first(self, deadline: float, *, retry: bool) -> _StoreConnection:
        """Connect. A server of this process may be out of descriptors: it is asked between attempts."""
        while True:
            try:
                until = deadline if self._server is None else min(deadline, time.monotonic() + TRY_S)
                return self._connect(until, retry=retry)
            except StoreTimeout:
                if self.limit is not None or time.monotonic() >= deadline:
                    raise

    def _connect(self, deadline: float, *, retry: bool) -> _StoreConnection:
        me = (self._job, self._name, socket.gethostname(), os.getpid())
        nonce = authentication.fresh_nonce() if self._token else b""
        hello = wire.ClientHello(wire.MAGIC, wire.VERSION, *me, nonce, self._tls, self._served_by)
        connector = StoreConnector(
            self.host, self.port, hello, self._token, deadline, self._timeout_s, self._world_size or 0
        )
        sock, welcome = connector.connect(retry)
        connection = _StoreConnection(sock, welcome, self.describe())
        with self._lock:
            self._open.add(connection)
            if not self._closed:
                return connection
        self._drop(connection)
        raise StoreError(message("the store was closed meanwhile", where=self.describe()))


def _serve(host: str, port: int, job: str, token: bytes, tls: bool) -> StoreServer:
    with limit_errors(StoreError, f"cannot serve a store on {address_text(host, port)}"):
        from unisono.engine.store.tcp_server import StoreServer  # imported late: few processes are servers

        return StoreServer(host, port, job=job, token=token, tls=tls)


class _StoreConnection:
    """A greeted connection: sends one operation, waits for its answer."""

    def __init__(self, sock: socket.socket, welcome: wire.ServerWelcome, where: str) -> None:
        self.sock = sock
        self.welcome = welcome
        self._where = where
        self._reader = wire.FrameReader(2**33)

    def ask(self, op: Op, payload: bytes, timeout_s: float, deadline: float) -> Reply:
        """The server's answer to `op`; after any exception the connection cannot be used again."""
        patience_s = min(timeout_s, deadline - GRACE_S - time.monotonic())  # connecting may have taken time
        pieces = wire.frame(wire.StoreRequest(op, max(0.0, patience_s)), payload)
        nbytes = sum(len(piece) for piece in pieces) - wire.PREFIX.size
        if nbytes > self.welcome.max_frame_bytes:
            raise ValueError(
                message(
                    "the value is too large for this store",
                    where=self._where,
                    observed=f"{nbytes} bytes",
                    expected=f"at most {self.welcome.max_frame_bytes}",
                )
            )
        try:
            send(self.sock, pieces, deadline)
            head, reply = receive(self.sock, self._reader, deadline)
            return wire.read_answer(head, reply)
        except TimeoutError:
            raise StoreTimeout(self._no_answer(op, timeout_s)) from None
        except (OSError, EOFError, wire.FrameFormatError) as error:
            raise StoreError(self._lost(error)) from error

    def hang_up(self) -> None:
        """End the connection, and wake a thread that waits in it."""
        with contextlib.suppress(OSError):  # already closed
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _no_answer(self, op: Op, timeout_s: float) -> str:
        what = " ".join([type(op).__name__.lower(), *getattr(op, "keys", [getattr(op, "key", "")])])
        return message(
            f"no answer to '{what.strip()}' within {timeout_s:g} s",
            where=self._where,
            remedy=f"See whether the server, process {self.welcome.pid} on {self.welcome.host}, is stopped.",
        )

    def _lost(self, error: BaseException) -> str:
        foreign = isinstance(error, wire.FrameFormatError)
        return message(
            "the store's server sent a bad frame" if foreign else "the store's server closed the connection",
            where=self._where,
            observed="" if isinstance(error, EOFError) else str(error),
            remedy=f"It was process {self.welcome.pid} on {self.welcome.host}: look at its output "
            "(rank 0, or the launcher).",
        )
