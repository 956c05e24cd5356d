"""How a client connects to the store's server: connect, greet, authenticate, retry."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import warnings
from typing import Any

from unisono.engine.base import authentication
from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.store import wire
from unisono.engine.store.address import address_text
from unisono.engine.store.authenticator import store_proof
from unisono.engine.store.operations import Value
from unisono.errors import AuthenticationError, StoreError, StoreTimeout, message

GREETING_S = 5.0  # a server that has not greeted for so long is named in a warning; it takes milliseconds
GREETING_CLIENTS = 64  # with more clients, which may share its host, the server has more time
SILENT_CLOSES = 5  # connections closed without an answer; a server that is ending closes them
TRY_S = 10.0  # one attempt to connect


class NotOurServer(StoreError):
    """Another program, or the store of another job, answers at the address.

    Attributes:
        reason: "foreign" (another program), "job", "version", or "closing" (the job there is ending).
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class StoreConnector:
    """Opens a connection and exchanges greetings; retries while the server does not run yet."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: wire.ClientHello,
        token: bytes,
        deadline: float,
        timeout_s: float,
        clients: int = 0,
    ) -> None:
        """clients: how many the server is expected to have; 0: a few."""
        self._address = (host, port)
        self._where = address_text(host, port)
        self._hello = hello
        self._token = token
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._channel = ""
        self._asked = time.monotonic()
        self._crowd = max(1.0, clients / GREETING_CLIENTS)

    def connect(self, retry: bool) -> tuple[socket.socket, wire.ServerWelcome]:
        """A greeted connection. Raises: see `TCPStore`."""
        pause_s, silent = 0.01, 0
        while True:
            try:
                return self._try_once()
            except NotOurServer as error:
                if error.reason != "closing" or not retry:
                    raise
                last: Exception = error
            except StoreTimeout:
                raise
            except (EOFError, ConnectionResetError) as error:
                silent += 1
                last = error
                if silent >= SILENT_CLOSES * self._crowd:
                    raise self._foreign("closed the connection without a greeting") from error
            except OSError as error:
                last = error
                if is_limit(error):
                    raise StoreError(
                        f"cannot reach the store at {self._where}: {limit_text(error)}"
                    ) from error
                if not retry:
                    raise self._gave_up(last, retry) from last
            if time.monotonic() + pause_s >= self._deadline:
                raise self._gave_up(last, retry) from last
            time.sleep(pause_s * (0.5 + os.urandom(1)[0] / 512))  # random: spreads clients
            pause_s = min(2 * pause_s, 0.2)

    def _try_once(self) -> tuple[socket.socket, wire.ServerWelcome]:
        last: OSError = ConnectionRefusedError("no address")
        for family, kind, proto, _, address in self._resolve():
            sock = socket.socket(family, kind, proto)
            try:
                sock.settimeout(max(0.001, min(TRY_S, self._deadline - time.monotonic())))
                sock.connect(address)
                to_itself = sock.getsockname() == sock.getpeername()  # connected to itself
            except OSError as error:  # also from getpeername: the server has ended
                sock.close()
                last = error
                continue
            except BaseException:
                sock.close()
                raise
            if to_itself:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()  # without TIME_WAIT, which would block the server's port
                continue
            return self._exchange_greetings(sock)
        raise last

    def _resolve(self) -> list[tuple[Any, Any, int, str, Any]]:
        host, port = self._address
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, OverflowError) as error:
            what = f"the store's address {self._where} is not usable: {error}"
            raise StoreError(message(what, remedy="Check MASTER_ADDR.")) from error

    def _exchange_greetings(self, sock: socket.socket) -> tuple[socket.socket, wire.ServerWelcome]:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greeting = self._converse(sock)
        except wire.FrameFormatError as error:
            sock.close()
            raise self._foreign(f"it sent {error.seen!r}") from error
        except TimeoutError as error:
            sock.close()
            raise StoreTimeout(self._silent("")) from error
        except BaseException:
            sock.close()
            raise
        if isinstance(greeting, wire.ServerWelcome):
            return self._secured(sock), greeting
        sock.close()
        if greeting.reason == "server":
            raise self._replaced()
        text = f"the store at {self._where} refused: {greeting.text}"
        raise AuthenticationError(text) if greeting.reason == "token" else NotOurServer(text, greeting.reason)

    def _converse(self, sock: socket.socket) -> wire.ServerWelcome | wire.Rejection:
        """Send Hello. If this client has a token, the server has to prove that it has it, too."""
        reader = wire.FrameReader(wire.HELLO_LIMIT)
        greeting = self._say(sock, reader, self._hello)
        if isinstance(greeting, wire.ServerChallenge):
            good = store_proof(self._token, "accept", self._hello, greeting.nonce)
            if not self._token or not authentication.verify(greeting.proof, good):
                raise AuthenticationError(self._wrong("its proof is of another token"))
            mine = store_proof(self._token, "connect", self._hello, greeting.nonce)
            channel = store_proof(self._token, "channel", self._hello, greeting.nonce)
            self._channel = authentication.channel_of(channel)
            greeting = self._say(sock, reader, wire.TokenProof(mine))
        elif isinstance(greeting, wire.ServerWelcome) and self._token:
            raise AuthenticationError(self._wrong("it let us in without a proof"))
        if isinstance(greeting, wire.ServerChallenge):
            raise wire.FrameFormatError("a second challenge")
        return greeting

    def _say(
        self, sock: socket.socket, reader: wire.FrameReader, frame: wire.ClientHello | wire.TokenProof
    ) -> wire.Greeting:
        """Send a frame and return the answer. A stopped server may go on: it has until the deadline."""
        send(sock, wire.frame(frame), self._deadline)  # fits into the kernel's buffer
        self._asked = time.monotonic()
        with contextlib.suppress(TimeoutError):
            until = min(self._asked + GREETING_S * self._crowd, self._deadline)
            return wire.read_greeting(receive(sock, reader, until)[0])
        if (left_s := self._deadline - time.monotonic()) > 0:
            warnings.warn(self._silent(f" This process waits for {left_s:.0f} s more."), stacklevel=2)
        return wire.read_greeting(receive(sock, reader, self._deadline)[0])

    def _wrong(self, seen: str) -> str:
        return message(
            f"the store at {self._where} does not have this job's token",
            observed=seen,
            remedy="Give every process of the job the same UNISONO_TOKEN_FILE (or UNISONO_TOKEN).",
        )

    def _secured(self, sock: socket.socket) -> socket.socket:
        if not self._hello.tls:
            return sock
        from unisono.engine.store import tls  # imported late: slow to load

        made = tls.context(self._token, server=False)
        return tls.wrap_socket(sock, made, server=False, channel=self._channel)

    def _replaced(self) -> StoreError:
        return StoreError(
            message(
                f"the store's server at {self._where} is gone: another one answers there",
                remedy="The job was started anew there, with an empty store: start it anew here, too.",
            )
        )

    def _silent(self, then: str) -> str:
        return message(
            f"the store at {self._where} does not answer",
            observed=f"it has sent nothing for {time.monotonic() - self._asked:.3g} s",
            remedy="Its process is stopped or overloaded: look at rank 0. Or another program has the port: "
            "choose another one (MASTER_PORT)." + then,
        )

    def _foreign(self, seen: str) -> NotOurServer:
        text = message(
            f"another program, no Unisono store, answers at {self._where}",
            observed=seen,
            remedy="Choose another port (MASTER_PORT), or end that program.",
        )
        return NotOurServer(text, "foreign")

    def _gave_up(self, last: Exception, retry: bool) -> StoreError:
        reason = getattr(last, "strerror", None) or str(last) or type(last).__name__
        if not retry:
            what = f"the store's server at {self._where} is gone"
            return StoreError(message(what, observed=reason, remedy="See rank 0's output."))
        return StoreTimeout(
            message(
                f"no store server at {self._where} within {self._timeout_s:g} s",
                observed=f"last error: {reason}",
                remedy="See whether rank 0 (or the launcher) was started there, and the address and port.",
            )
        )


def send(sock: socket.socket, pieces: list[Value], deadline: float) -> None:
    """Send all of `pieces`; TimeoutError when the deadline comes first."""
    for piece in pieces:
        sock.settimeout(_left(deadline))
        sock.sendall(piece)


def receive(sock: socket.socket, reader: wire.FrameReader, deadline: float) -> tuple[bytearray, bytearray]:
    """The next frame; TimeoutError when the deadline comes first.

    A frame that arrived before the deadline counts, even if this process was stopped and reads it later.
    """
    while True:
        sock.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            received = reader.advance(sock)
        except BlockingIOError:  # the deadline has passed
            raise TimeoutError from None
        if received is not None:
            return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
