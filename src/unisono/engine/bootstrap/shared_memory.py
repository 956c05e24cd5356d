"""Maps one shared memory into the ranks of a host.

The first rank creates a memfd without a name, listens on an abstract Unix socket and publishes the socket's
name in the store. The others connect, send their rank, and receive the descriptor once all have connected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec

from unisono import _native
from unisono.engine.bootstrap.failures import (
    GRACE_S,
    first_failure,
    patience_s,
    raise_if_failed,
    seconds_left,
)
from unisono.engine.bootstrap.liveness import LivenessMonitor
from unisono.engine.store import Store
from unisono.errors import RendezvousError, StoreTimeout, message

MOST_BYTES = 200  # of the reason that is reported through the memory
SAYS_S = 2.0  # for a rank that gave up to report its reason
INTRODUCTION_S = 10.0  # for a connected process of this user to send its rank
_ZERO_COPY, _NO_ZERO_COPY = b"\1", b"\0"
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class _RegionOffer(msgspec.Struct):
    """Where the first rank listens, and the memory that it made."""

    address: bytes
    staging_bytes: int


class _RankGreeting(msgspec.Struct):
    rank: int


_decode_offer = msgspec.msgpack.Decoder(_RegionOffer).decode
_decode_introduction = msgspec.msgpack.Decoder(_RankGreeting).decode


def share_memory(
    store: Store,
    rank: int,
    local_ranks: list[int],
    liveness: LivenessMonitor,
    *,
    deadline: float,
    staging_bytes: int,
    zero_copy: bool = False,
) -> _native.Region:
    """The memory of the ranks `local_ranks` (this one among them), mapped by all of them.

    Args:
        liveness: of these ranks, so that no rank waits for one that has ended.
        zero copy: this rank can read the memory of the others; they use zero copy if all can.
    Raises:
        RendezvousError: one of them did not join in time, ended, failed, or cannot map the memory.
    """
    if len(local_ranks) == 1:
        return _native.Region(-1, 1, staging_bytes, True)
    if rank == local_ranks[0]:
        region, all_zero_copy = _share(store, local_ranks, liveness, deadline, staging_bytes, zero_copy)
    else:
        region, all_zero_copy = _join(store, rank, local_ranks, liveness, deadline, zero_copy)
    if all_zero_copy:
        region.enable_zero_copy()
    return region


@contextlib.contextmanager
def abort_on_failure(region: _native.Region, place: int) -> Iterator[None]:
    """Report a failure of this block, through the memory, to the ranks that have mapped it."""
    try:
        yield
    except BaseException as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        region.give_up(place, why.encode("utf-8", "replace")[:MOST_BYTES].decode("utf-8", "ignore"))
        raise


def memory_key(first: int) -> str:
    """The key under which the first rank of a host offers its memory."""
    return f"memory/{first}"


# ---- the first rank ------------------------------------------------------------------------------------


def _share(
    store: Store,
    local_ranks: list[int],
    liveness: LivenessMonitor,
    deadline: float,
    staging_bytes: int,
    zero_copy: bool,
) -> tuple[_native.Region, bool]:
    memory = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        region = _native.Region(os.dup(memory), len(local_ranks), staging_bytes, True)
        address = b"\0unisono-" + os.urandom(16).hex().encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            # Other users can connect, too; they must not fill the queue.
            listener.listen(len(local_ranks) + 128)
            store.set(
                memory_key(local_ranks[0]), msgspec.msgpack.encode(_RegionOffer(address, staging_bytes))
            )
            with abort_on_failure(region, 0):
                return region, _send_memory(
                    store, listener, memory, local_ranks, liveness, deadline, zero_copy
                )
    finally:
        os.close(memory)


def _send_memory(
    store: Store,
    listener: socket.socket,
    memory: int,
    local_ranks: list[int],
    liveness: LivenessMonitor,
    deadline: float,
    zero_copy: bool,
) -> bool:
    """Send the memory to all ranks; returns whether all can read each other's memory."""
    connections: dict[int, socket.socket] = {}

    def naming(other: int) -> AbstractContextManager[None]:
        late = f"rank {other} opened the group's shared memory, but did not map it in time"
        return _naming(store, liveness, other, (local_ranks[0], other), late)

    try:
        while len(connections) < len(local_ranks) - 1:
            sock, introduced = _receive(store, listener, local_ranks, liveness, deadline, connections)
            if introduced in connections:
                connections[introduced].close()
            connections[introduced] = sock
        for other, sock in connections.items():
            with naming(other):
                socket.send_fds(sock, [b"\0"], [memory])
        for other, sock in connections.items():  # not before all have it
            with naming(other):
                zero_copy &= _received(sock, liveness, deadline) == _ZERO_COPY
        for other, sock in connections.items():
            with naming(other):
                sock.sendall(_ZERO_COPY if zero_copy else _NO_ZERO_COPY)
        return zero_copy
    finally:
        for sock in connections.values():
            sock.close()


def _receive(
    store: Store,
    listener: socket.socket,
    local_ranks: list[int],
    liveness: LivenessMonitor,
    deadline: float,
    known: dict[int, socket.socket],
) -> tuple[socket.socket, int]:
    """The next rank that connects. Connections of other users, or with invalid bytes, are closed."""
    while True:
        listener.settimeout(seconds_left(deadline))
        try:
            liveness.wait_for(listener, min(deadline, time.monotonic() + patience_s(len(local_ranks))))
            sock, _ = listener.accept()
        except TimeoutError:
            raise_if_failed(store)
            if time.monotonic() >= deadline:
                raise RendezvousError(_missing(local_ranks, known)) from None
            continue
        sock.settimeout(min(INTRODUCTION_S, seconds_left(deadline)))
        try:
            if _same_user(sock):  # before a byte is read
                introduction = _decode_introduction(sock.recv(256))
                if introduction.rank in local_ranks[1:]:
                    return sock, introduction.rank
        except (OSError, msgspec.DecodeError, RecursionError):
            pass
        sock.close()


def _same_user(peer: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _missing(local_ranks: list[int], known: dict[int, socket.socket]) -> str:
    missing = ", ".join(str(rank) for rank in local_ranks[1:] if rank not in known)
    return message(
        f"rank {missing} did not open the group's shared memory",
        observed=f"{len(known) + 1} of {len(local_ranks)} ranks",
        expected="all",
        remedy="Look at that rank's output, or raise timeout=.",
    )


# ---- the other ranks -----------------------------------------------------------------------------------


def _join(
    store: Store,
    rank: int,
    local_ranks: list[int],
    liveness: LivenessMonitor,
    deadline: float,
    zero_copy: bool,
) -> tuple[_native.Region, bool]:
    first = local_ranks[0]
    deadline += GRACE_S  # the first rank reports its failure at its own deadline
    offer = _offer(store, local_ranks, liveness, deadline)
    late = f"rank {rank} waited for the group's shared memory, but not all ranks opened it in time"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        host.settimeout(seconds_left(deadline))
        with _naming(store, liveness, first, (first, rank), late):
            _connect(host, offer.address, deadline)
            host.sendall(msgspec.msgpack.encode(_RankGreeting(rank)))
            # The first rank watches the others. One that ends now may have been in the group already.
            liveness.wait_for(host, deadline, first)
            _, descriptors, _, _ = socket.recv_fds(host, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise ConnectionResetError
        region = _native.Region(descriptors[0], len(local_ranks), offer.staging_bytes, False)
        place = local_ranks.index(rank)
        with abort_on_failure(region, place), _naming(store, liveness, first, (first, rank), late):
            host.sendall(_ZERO_COPY if zero_copy else _NO_ZERO_COPY)
            return region, _received(host, liveness, deadline, first) == _ZERO_COPY


def _offer(store: Store, local_ranks: list[int], liveness: LivenessMonitor, deadline: float) -> _RegionOffer:
    while True:
        try:
            found = store.get(
                memory_key(local_ranks[0]), min(patience_s(len(local_ranks)), seconds_left(deadline))
            )
            return _decode_offer(found)
        except StoreTimeout as error:
            liveness.check()
            raise_if_failed(store)
            if time.monotonic() >= deadline:
                text = f"rank {local_ranks[0]} did not offer its shared memory in time: {error}"
                raise RendezvousError(text) from error


def _connect(host: socket.socket, address: bytes, deadline: float) -> None:
    """Connect to the first rank, which must be a process of this user."""
    while True:
        try:
            host.connect(address)
            break
        except BlockingIOError:  # its queue is full at the moment
            if time.monotonic() >= deadline:
                raise TimeoutError("the queue stayed full") from None
            time.sleep(0.01)
    if not _same_user(host):
        raise PermissionError("the process that offers it belongs to another user")


# ---- all of them ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(
    store: Store, liveness: LivenessMonitor, peer: int, pair: tuple[int, int], late: str
) -> Iterator[None]:
    """Turn errors of a connection into errors that name the peer and its failure.

    Args:
        pair: the first rank, and the rank that connects.  late: the text for a missed deadline.
    """
    try:
        yield
    except TimeoutError as error:
        raise RendezvousError(late) from error
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        raise _closed_early(store, peer, liveness) from None
    except OSError as error:
        raise RendezvousError(
            message(
                f"rank {pair[1]} cannot map the memory of rank {pair[0]}, though both are on one host",
                observed=str(error),
                remedy="Set UNISONO_RANKS_PER_HOST=1 if something here forbids passing descriptors.",
            )
        ) from error


def _received(
    peer: socket.socket, liveness: LivenessMonitor, deadline: float, only: int | None = None
) -> bytes:
    """The byte that the other end sends. `only`: the rank whose end ends the wait; None: any."""
    liveness.wait_for(peer, deadline, only)
    byte = peer.recv(1)
    if not byte:
        raise ConnectionResetError
    return byte


def _closed_early(store: Store, peer: int, liveness: LivenessMonitor) -> RendezvousError:
    """Why the other end closed its connection."""
    try:
        liveness.check()  # it may have failed because another rank died
        liveness.check_end(peer)
    except RendezvousError as error:
        return error
    unknown = f"rank {peer} gave up while the group was being made; its own error has the reason"
    return RendezvousError(first_failure(store, SAYS_S) or unknown)
