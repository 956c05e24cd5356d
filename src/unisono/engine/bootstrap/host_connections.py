"""Connects every rank with the ranks on other hosts.

Each rank listens on one port and publishes it in the store. Of two ranks the lower connects to the higher,
once for each kind of connection. Both prove that they know a secret of this group before any other byte is
used. When all ranks have all connections, no rank listens any more: nobody can connect to a running group.

Kinds: `control` (status, closes and deaths; the engine reads it at all times), `data` (collectives),
`messages` (point to point). A full connection says nothing about its peer, so only `control` has the timeouts
that detect a lost host.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import msgspec

from unisono.engine.base.authentication import handshake
from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.bootstrap.admission import UnauthenticatedConnections
from unisono.engine.bootstrap.connector_pool import ConnectorPool, start_thread
from unisono.engine.bootstrap.failures import (
    GRACE_S,
    POLL_S,
    await_key,
    fail,
    patience_s,
    raise_if_failed,
    seconds_left,
)
from unisono.engine.bootstrap.interfaces import advertised_address, is_loopback, listen, local_addresses, via
from unisono.engine.bootstrap.peer_info import Membership, gather
from unisono.engine.bootstrap.peer_sockets import KINDS, PeerSockets, prepare
from unisono.engine.environment.env import Settings
from unisono.engine.environment.event_log import LOG
from unisono.engine.store import Store
from unisono.engine.store.address import address_text
from unisono.errors import AuthenticationError, RendezvousError, StoreError, StoreTimeout, message

if TYPE_CHECKING:
    from unisono.engine.bootstrap.tls_relay import TlsRelay

HANDSHAKE_S = 2.0  # for a peer to authenticate itself
UNAUTHENTICATED = 64  # connections at one time
PATIENCE_S = 0.5  # the least time an unauthenticated peer gets while others wait
CONNECT_S = 20.0  # for a connection that nobody answers
CONNECT_SHARE = 0.75  # of the time left: a rank without an answer reports it before the others time out
FULL_S = 1.0  # pause without a free descriptor; unauthenticated peers are disconnected by then
WELCOME = b"\1"


class ListenAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank listens, on one of its interfaces."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_text(self.host, self.port)


_decode_endpoints = msgspec.msgpack.Decoder(list[ListenAddress]).decode
_decode_all_endpoints = msgspec.msgpack.Decoder(list[list[ListenAddress]]).decode


def connect_hosts(
    store: Store,
    membership: Membership,
    rank: int,
    *,
    deadline: float,
    master: str | None,
    peer_timeout_s: float,
    buffer_bytes: int = 0,
    settings: Settings | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> PeerSockets:
    """The connections of `rank` to all ranks on other hosts.

    Args:
        master: name or address of a host that every rank reaches; it decides the interface.
        peer_timeout_s: seconds after which a host that does not answer counts as lost.
        buffer_bytes: size of the kernel's buffers; 0: the kernel's choice.
        settings: interfaces, ports and the job's token; None: any and none.
        kinds: of the connections.
    Raises:
        RendezvousError: two ranks cannot reach each other; all ranks raise it, and it names the two.
        ValueError: TLS without a token.
    """
    settings = settings or Settings()
    return _HostConnector(
        store, membership, rank, deadline, master, peer_timeout_s, buffer_bytes, settings, kinds
    ).connect()


class _HostConnector:
    def __init__(
        self,
        store: Store,
        membership: Membership,
        rank: int,
        deadline: float,
        master: str | None,
        peer_timeout_s: float,
        buffer_bytes: int,
        settings: Settings,
        kinds: tuple[str, ...],
    ) -> None:
        self._store = store
        self._kinds = kinds
        self._membership = membership
        self._rank = rank
        self._size = len(membership.peers)
        self._deadline = deadline
        self._master = master
        self._peer_timeout_s = peer_timeout_s
        self._buffer_bytes = buffer_bytes
        self._settings = settings
        self._addresses: list[str] = []  # of the interfaces in use
        self._secret = (
            settings.token + membership.nonce
        )  # without a token: the nonce, which only clients of the store know
        self._relays = _relays(settings.token, peer_timeout_s) if settings.tls else None
        self._sockets = PeerSockets(self._size, kinds)
        local_ranks = membership.local_ranks(rank)
        remote_ranks = [info.rank for info in membership.peers if info.rank not in local_ranks]
        self._lower = [peer for peer in remote_ranks if peer < rank]
        self._higher = [peer for peer in remote_ranks if peer > rank]
        self._stopped = threading.Event()
        self._connector = ConnectorPool(self._stopped)

    def connect(self) -> PeerSockets:
        """Listen, publish the address, connect and accept, and wait until all ranks have done so."""
        try:
            with contextlib.ExitStack() as listening:
                listeners = [listening.enter_context(each) for each in self._listen()]
                mine = [
                    ListenAddress(*advertised_address(self._settings, listener)) for listener in listeners
                ]
                endpoints = self._exchange(mine)
                accepting: list[threading.Thread] = []
                try:
                    accepting.extend(start_thread(self._accept, listener) for listener in listeners)
                    calls = [(peer, kind) for peer in self._higher for kind in self._kinds]
                    self._connector.each(lambda peer, kind: self._connect(peer, kind, endpoints[peer]), calls)
                    self._await_lower()
                    self._await_everybody()
                finally:
                    self._stopped.set()
                    for listener in listeners:
                        with contextlib.suppress(OSError):
                            listener.shutdown(socket.SHUT_RDWR)  # ends a call of accept at once
                    for thread in accepting:
                        thread.join()
        except BaseException:
            self._sockets.close()
            raise
        finally:
            if self._relays is not None:
                self._relays.close()
        return self._sockets

    # -- listening

    def _listen(self) -> list[socket.socket]:
        """One listening socket for each interface."""
        here = self._membership.in_one_network() and not self._settings.socket_ifname
        listeners: list[socket.socket] = []
        try:
            self._addresses = ["127.0.0.1"] if here else local_addresses(self._master, self._settings)
            listeners.extend(listen(self._settings, address) for address in self._addresses)
            if LOG.level:
                LOG.info("net", f"rank {self._rank} listens on {', '.join(self._addresses)}")
        except (RendezvousError, StoreError) as error:
            for listener in listeners:
                listener.close()
            self._fail(f"rank {self._rank} (host {self._host(self._rank)}) cannot listen: {error}")
        return listeners

    def _exchange(self, mine: list[ListenAddress]) -> list[list[ListenAddress]]:
        """The endpoints of all ranks, by rank."""
        encoded = msgspec.msgpack.encode(mine)
        found = gather(self._store, "endpoint", self._rank, self._size, encoded, self._deadline)
        if self._rank == 0:
            endpoints = [_decode_endpoints(each) for each in found]
            self._refuse_loopback(endpoints)
            self._store.set("endpoints", msgspec.msgpack.encode(endpoints))
            return endpoints
        return _decode_all_endpoints(self._await("endpoints"))

    def _refuse_loopback(self, endpoints: list[list[ListenAddress]]) -> None:
        """Refuse loopback addresses of other hosts: on every host they mean that host."""
        if self._membership.in_one_network():
            return
        for rank, places in enumerate(endpoints):
            for place in places:
                if _is_loopback(place.host):
                    self._fail(
                        message(
                            f"rank {rank} (host {self._host(rank)}) can only be reached at {place.host}, "
                            "which no other host can use",
                            remedy="Give MASTER_ADDR as an address of the network that joins the hosts, "
                            "not as localhost or a name that means it, or set UNISONO_SOCKET_IFNAME.",
                        )
                    )

    def _host(self, rank: int) -> str:
        return self._membership.peers[rank].name

    # -- connecting to higher ranks

    def _connect(self, peer: int, kind: str, places: list[ListenAddress]) -> None:
        """Connect, until the other side confirms the connection.

        A busy peer may close it before the handshake is done; then connect again. Where hosts have several
        interfaces, the pairs of ranks are spread over them.
        """
        turn = self._rank + peer
        endpoint = places[turn % len(places)]
        several = len(self._addresses) > 1
        source = self._addresses[turn % len(self._addresses)] if several else None
        while True:
            try:
                limit = min(CONNECT_SHARE * self._left(), CONNECT_S)
                sock = self._connector.connect(endpoint.host, endpoint.port, limit, source)
            except OSError as error:
                self._refuse_limit(error)
                self._unreachable(peer, endpoint, str(error))
            if sock is None:
                return None
            try:
                channel = self._introduce(sock, peer, kind)
            except (OSError, AuthenticationError) as error:
                sock.close()
                if self._stopped.is_set():
                    return None
                if time.monotonic() >= self._deadline:
                    self._unreachable(peer, endpoint, str(error))
            else:
                return self._sockets.put(kind, peer, self._secured(sock, channel, server=False))
            raise_if_failed(self._store)
            self._stopped.wait(POLL_S)

    def _introduce(self, sock: socket.socket, peer: int, kind: str) -> str:
        met = handshake(
            sock,
            self._secret,
            role="connect",
            me=f"{kind} of rank {self._rank}",
            expect=f"rank {peer}",
            job="data",
            deadline_s=min(self._left(), CONNECT_S),
        )
        if sock.recv(1) != WELCOME:
            raise ConnectionResetError("it closed the connection")
        self._prepare(sock, kind)
        return met.channel

    def _refuse_limit(self, error: BaseException) -> None:
        """Fail if the error is a limit of this process, and not of the network."""
        if is_limit(error):
            connections = len(self._kinds) * (len(self._lower) + len(self._higher))
            takes = f"the ranks on other hosts take {connections} here"
            who = f"rank {self._rank} (host {self._host(self._rank)})"
            self._fail(f"{who} cannot connect to the others: {limit_text(error, takes)}")

    def _unreachable(self, peer: int, endpoint: ListenAddress, why: str) -> NoReturn:
        self._fail(
            message(
                f"rank {self._rank} (host {self._host(self._rank)}) cannot reach rank {peer} "
                f"(host {self._host(peer)}) at {endpoint} through {via(endpoint.host)}",
                observed=why,
                remedy="Check firewalls and routes between these hosts, or choose other interfaces "
                "(UNISONO_SOCKET_IFNAME) or ports (UNISONO_PORT_RANGE).",
            )
        )

    # -- connections from lower ranks

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(POLL_S)
        handshakes: list[threading.Thread] = []
        full_since = 0.0
        with UnauthenticatedConnections(UNAUTHENTICATED, PATIENCE_S) as unauthenticated:
            while not self._stopped.is_set():
                unauthenticated.make_room()
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # that peer has disconnected, or no descriptor is free
                    if self._stopped.is_set():
                        break
                    full_since = (full_since or time.monotonic()) if is_limit(error) else 0.0
                    if full_since and time.monotonic() > full_since + FULL_S:
                        with contextlib.suppress(RendezvousError, StoreError):  # the store reports it to all
                            self._refuse_limit(error)
                        return
                    time.sleep(0.01)
                    continue
                full_since = 0.0
                unauthenticated.add(sock)
                handshakes = [each for each in handshakes if each.is_alive()]
                handshakes.append(start_thread(self._receive, sock, unauthenticated))
        for each in handshakes:
            each.join()

    def _receive(self, sock: socket.socket, unauthenticated: UnauthenticatedConnections) -> None:
        """Keep the connection of an authenticated lower rank; close every other one."""
        try:
            name, channel = handshake(
                sock,
                self._secret,
                role="accept",
                me=f"rank {self._rank}",
                expect=None,
                job="data",
                deadline_s=HANDSHAKE_S,
            )
            kind, _, text = name.partition(" of rank ")
            peer = int(text) if text.isdecimal() else -1
            known = kind in self._kinds and peer in self._lower
            if not known or not unauthenticated.remove(sock):  # it may have been disconnected just now
                raise AuthenticationError(f"{name!r} is not a connection of a lower rank of this group")
            sock.sendall(WELCOME)
            self._prepare(sock, kind)
        except (OSError, AuthenticationError):
            unauthenticated.remove(sock)
            sock.close()
            return
        with contextlib.suppress(RendezvousError, StoreError):  # the store reports it to all
            self._sockets.put(kind, peer, self._secured(sock, channel, server=True))

    def _await_lower(self) -> None:
        while missing := self._sockets.missing(self._lower, min(patience_s(self._size), self._left())):
            raise_if_failed(self._store)
            if time.monotonic() >= self._deadline:
                names = ", ".join(map(str, missing))
                me = f"rank {self._rank} (host {self._host(self._rank)})"
                remedy = "Look at its output, or raise timeout=."
                self._fail(message(f"rank {names} did not connect to {me} in time", remedy=remedy))

    # -- all ranks

    def _await_everybody(self) -> None:
        """Wait for the others; this rank has all its connections.

        A store that has ended meanwhile, with the rank that serves it, ends no group: the first call names
        that rank, and the others can shrink.
        """
        try:
            if self._store.add("connected", 1) == self._size:
                self._store.set("all connected", b"")
            self._await("all connected")
        except StoreTimeout:
            raise
        except StoreError:
            return

    def _await(self, key: str) -> bytes:
        """The value of a key, unless a rank fails first."""
        try:
            return await_key(self._store, key, self._size, self._deadline + GRACE_S)
        except StoreTimeout as error:
            raise RendezvousError(f"not all ranks were connected in time: {error}") from error

    def _fail(self, text: str) -> NoReturn:
        fail(self._store, text)

    def _prepare(self, sock: socket.socket, kind: str) -> None:
        prepare(sock, kind, peer_timeout_s=self._peer_timeout_s, buffer_bytes=self._buffer_bytes)

    def _secured(self, sock: socket.socket, channel: str, *, server: bool) -> socket.socket:
        if self._relays is None:
            return sock
        try:
            return self._relays.carry(sock, server=server, channel=channel)
        except OSError as error:
            self._fail(
                f"rank {self._rank} (host {self._host(self._rank)}) cannot encrypt connections: {error}"
            )

    def _left(self) -> float:
        return seconds_left(self._deadline)


def _relays(token: bytes, peer_timeout_s: float) -> TlsRelay:
    from unisono.engine.bootstrap.tls_relay import TlsRelay  # imported late: the TLS library is slow to load

    return TlsRelay(token, peer_timeout_s)


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name, from UNISONO_ADVERTISE
        return host == "localhost"
