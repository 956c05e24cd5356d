"""Brings the ranks of one host to the memory they share.

The first of them makes a nameless memfd, listens on an abstract Unix socket and puts the socket's name into
the store. The others connect, say who they are, and get the descriptor once all have come.
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
from unisono.bootstrap.failures import (
    GRACE_S,
    first_failure,
    left,
    patience_s,
    raise_if_failed,
)
from unisono.bootstrap.liveness import Lives
from unisono.errors import RendezvousError, StoreTimeout, message
from unisono.store import Store

__all__ = ["given_up_on_failure", "memory_key", "share_memory"]

MOST_BYTES = 200  # of the reason that is told through the memory
SAYS_S = 2.0  # in which a rank that gave up tells why
INTRODUCTION_S = 10.0  # in which a process of this user that has connected says which rank it is
_LENDS, _LENDS_NOT = b"\1", b"\0"
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class _Invitation(msgspec.Struct):
    """Where the first rank listens, and what it made."""

    address: bytes
    staging_bytes: int


class _Introduction(msgspec.Struct):
    rank: int


def share_memory(
    store: Store,
    rank: int,
    mates: list[int],
    lives: Lives,
    *,
    deadline: float,
    staging_bytes: int,
    lending: bool = False,
) -> _native.Region:
    """The memory of the ranks `mates` (this one among them), mapped by all of them.

    Args:
        lives: of the mates, so that nobody waits for one that has ended.
        lending: this rank can read the own memory of the others; they lend it when that goes for all.
    Raises:
        RendezvousError: one of them did not come in time, ended, failed, or cannot map it.
    """
    if len(mates) == 1:
        return _native.Region(-1, 1, staging_bytes, True)
    if rank == mates[0]:
        region, all_lend = _invite(store, mates, lives, deadline, staging_bytes, lending)
    else:
        region, all_lend = _join(store, rank, mates, lives, deadline, lending)
    if all_lend:
        region.allow_lending()
    return region


@contextlib.contextmanager
def given_up_on_failure(region: _native.Region, place: int) -> Iterator[None]:
    """Whatever is raised here tells those who have the memory that the rank in that place will not come."""
    try:
        yield
    except BaseException as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        region.give_up(place, why.encode("utf-8", "replace")[:MOST_BYTES].decode("utf-8", "ignore"))
        raise


def memory_key(first: int) -> str:
    """Where in the store the first rank of a host tells of its memory."""
    return f"memory/{first}"


# ---- the first rank ------------------------------------------------------------------------------------


def _invite(
    store: Store, mates: list[int], lives: Lives, deadline: float, staging_bytes: int, lending: bool
) -> tuple[_native.Region, bool]:
    memory = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        region = _native.Region(os.dup(memory), len(mates), staging_bytes, True)
        address = b"\0unisono-" + os.urandom(16).hex().encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(len(mates) + 128)  # strangers may knock; they must not fill the queue
            store.set(memory_key(mates[0]), msgspec.msgpack.encode(_Invitation(address, staging_bytes)))
            with given_up_on_failure(region, 0):
                return region, _hand_out(store, listener, memory, mates, lives, deadline, lending)
    finally:
        os.close(memory)


def _hand_out(
    store: Store,
    listener: socket.socket,
    memory: int,
    mates: list[int],
    lives: Lives,
    deadline: float,
    lending: bool,
) -> bool:
    """Give the memory to all guests; whether all ranks can read each other's own."""
    guests: dict[int, socket.socket] = {}

    def talking(mate: int) -> AbstractContextManager[None]:
        late = f"rank {mate} came to the group's shared memory, but did not map it in time"
        return _talking(store, lives, mate, (mates[0], mate), late)

    try:
        while len(guests) < len(mates) - 1:
            guest, introduced = _receive(store, listener, mates, lives, deadline, guests)
            if introduced in guests:
                guests[introduced].close()
            guests[introduced] = guest
        for mate, guest in guests.items():
            with talking(mate):
                socket.send_fds(guest, [b"\0"], [memory])
        for mate, guest in guests.items():  # leave only when all have it
            with talking(mate):
                lending &= _heard(guest, lives, deadline) == _LENDS
        for mate, guest in guests.items():
            with talking(mate):
                guest.sendall(_LENDS if lending else _LENDS_NOT)
        return lending
    finally:
        for guest in guests.values():
            guest.close()


def _receive(
    store: Store,
    listener: socket.socket,
    mates: list[int],
    lives: Lives,
    deadline: float,
    known: dict[int, socket.socket],
) -> tuple[socket.socket, int]:
    """The next rank that comes. Strangers (other users, garbage) are turned away."""
    while True:
        listener.settimeout(left(deadline))
        try:
            lives.wait_for(listener, min(deadline, time.monotonic() + patience_s(len(mates))))
            guest, _ = listener.accept()
        except TimeoutError:
            raise_if_failed(store)
            if time.monotonic() >= deadline:
                raise RendezvousError(_missing(mates, known)) from None
            continue
        guest.settimeout(min(INTRODUCTION_S, left(deadline)))
        try:
            if _same_user(guest):  # asked before a single byte is waited for
                introduction = msgspec.msgpack.decode(guest.recv(256), type=_Introduction)
                if introduction.rank in mates[1:]:
                    return guest, introduction.rank
        except (OSError, msgspec.DecodeError):
            pass
        guest.close()


def _same_user(peer: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _missing(mates: list[int], known: dict[int, socket.socket]) -> str:
    missing = ", ".join(str(rank) for rank in mates[1:] if rank not in known)
    return message(
        f"rank {missing} did not come to the group's shared memory",
        observed=f"{len(known) + 1} of {len(mates)} ranks",
        expected="all",
        remedy="Look at that rank's output, or raise timeout=.",
    )


# ---- the other ranks -----------------------------------------------------------------------------------


def _join(
    store: Store, rank: int, mates: list[int], lives: Lives, deadline: float, lending: bool
) -> tuple[_native.Region, bool]:
    first = mates[0]
    deadline += GRACE_S  # for what the first says at its own
    invitation = _invitation(store, mates, lives, deadline)
    late = f"rank {rank} waited for the group's shared memory, but not all ranks came to it in time"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        host.settimeout(left(deadline))
        with _talking(store, lives, first, (first, rank), late):
            _connect(host, invitation.address, deadline)
            host.sendall(msgspec.msgpack.encode(_Introduction(rank)))
            lives.wait_for(host, deadline)
            _, descriptors, _, _ = socket.recv_fds(host, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise ConnectionResetError
        region = _native.Region(descriptors[0], len(mates), invitation.staging_bytes, False)
        place = mates.index(rank)
        with given_up_on_failure(region, place), _talking(store, lives, first, (first, rank), late):
            host.sendall(_LENDS if lending else _LENDS_NOT)
            return region, _heard(host, lives, deadline) == _LENDS


def _invitation(store: Store, mates: list[int], lives: Lives, deadline: float) -> _Invitation:
    while True:
        try:
            told = store.get(memory_key(mates[0]), min(patience_s(len(mates)), left(deadline)))
            return msgspec.msgpack.decode(told, type=_Invitation)
        except StoreTimeout as error:
            lives.check()
            raise_if_failed(store)
            if time.monotonic() >= deadline:
                text = f"rank {mates[0]} did not offer its shared memory in time: {error}"
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
def _talking(store: Store, lives: Lives, peer: int, pair: tuple[int, int], late: str) -> Iterator[None]:
    """Errors in talking with `peer` say who it is and what became of it. `pair`: the first rank, and a guest;
    `late`: what to say when the deadline has come.
    """
    try:
        yield
    except TimeoutError as error:
        raise RendezvousError(late) from error
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        raise RendezvousError(_gave_up(store, peer, lives)) from None
    except OSError as error:
        raise RendezvousError(
            message(
                f"rank {pair[1]} cannot map the memory of rank {pair[0]}, though both are on one host",
                observed=str(error),
                remedy="Set UNISONO_RANKS_PER_HOST=1 if something here forbids passing descriptors.",
            )
        ) from error


def _heard(peer: socket.socket, lives: Lives, deadline: float) -> bytes:
    """The byte that comes from the other end."""
    lives.wait_for(peer, deadline)
    byte = peer.recv(1)
    if not byte:
        raise ConnectionResetError
    return byte


def _gave_up(store: Store, peer: int, lives: Lives) -> str:
    lives.check()  # that of which it heard a moment earlier
    lives.check_end(peer)
    unknown = f"rank {peer} gave up while the group was being made; its own error tells why"
    return first_failure(store, SAYS_S) or unknown
