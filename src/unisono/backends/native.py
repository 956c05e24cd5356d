"""Brings the ranks of a group to their shared memory, and makes the engine over it.

The first rank makes a nameless memfd, listens on an abstract Unix socket and puts the socket's name into
the store. Every other rank connects, says who it is, and gets the descriptor with the list of all process
ids once all have come. Two ranks are on one host when this works, not because a variable says so.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from unisono import _native
from unisono.env import Settings
from unisono.errors import RendezvousError, StoreTimeout, message
from unisono.store import Store

__all__ = ["EngineSettings", "open_engine"]

_KEY = "shared-memory"
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_FRAME_BYTES = 1 << 20


class _Invitation(msgspec.Struct):
    """Where the first rank listens, and what it made."""

    address: bytes
    staging_bytes: int


class _Introduction(msgspec.Struct):
    """Who a rank is. `born` is its start time in clock ticks, so that a reused pid is recognised."""

    rank: int
    pid: int
    born: int


@dataclass(frozen=True)
class EngineSettings:
    """What of the settings the engine takes."""

    staging_bytes: int
    spin_us: float
    status_fd: int

    @classmethod
    def of(cls, settings: Settings) -> EngineSettings:
        """From the environment's settings."""
        page = 4096
        staging = max(16 * page, -(-settings.staging_bytes // page) * page)
        status_fd = -1 if settings.status_fd is None else settings.status_fd
        return cls(staging, float(settings.spin_us), status_fd)


def open_engine(
    store: Store, rank: int, size: int, *, timeout_s: float, settings: EngineSettings
) -> _native.Engine:
    """The engine of `rank`, once all ranks of the group have come.

    Raises:
        RendezvousError: somebody did not come in time, or cannot share memory with the first rank.
    """
    deadline = time.monotonic() + timeout_s
    if size == 1:
        region, introductions = _native.Region(-1, 1, settings.staging_bytes, True), [_introduction(0)]
    elif rank == 0:
        region, introductions = _invite(store, size, deadline, settings)
    else:
        region, introductions = _join(store, rank, size, deadline)
    pidfds: list[int] = []
    try:
        for one in introductions:
            pidfds += [_watch(one)]
    except BaseException:
        for pidfd in pidfds:
            if pidfd >= 0:
                os.close(pidfd)
        raise
    cores = len(os.sched_getaffinity(0))
    return _native.Engine(region, rank, pidfds, settings.status_fd, cores, settings.spin_us)


def _introduction(rank: int) -> _Introduction:
    return _Introduction(rank, os.getpid(), _born(os.getpid()))


def _born(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def _watch(peer: _Introduction) -> int:
    """A descriptor that tells of a rank's death; -1 for a rank of this very process."""
    if peer.pid == os.getpid():
        return -1
    try:
        pidfd = os.pidfd_open(peer.pid)
        if _born(peer.pid) == peer.born:
            return pidfd
        os.close(pidfd)
    except OSError:
        pass
    raise RendezvousError(f"rank {peer.rank} (pid {peer.pid}) ended while the group was being made")


# ---- the first rank ------------------------------------------------------------------------------------


def _invite(
    store: Store, size: int, deadline: float, settings: EngineSettings
) -> tuple[_native.Region, list[_Introduction]]:
    memory = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        region = _native.Region(os.dup(memory), size, settings.staging_bytes, True)
        address = b"\0unisono-" + secrets.token_hex(16).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(size + 128)  # strangers may knock; they must not fill the queue
            store.set(_KEY, msgspec.msgpack.encode(_Invitation(address, settings.staging_bytes)))
            return region, _receive_all(listener, memory, size, deadline)
    finally:
        os.close(memory)


def _receive_all(listener: socket.socket, memory: int, size: int, deadline: float) -> list[_Introduction]:
    introductions = {0: _introduction(0)}
    guests: list[socket.socket] = []
    try:
        while len(introductions) < size:
            guest, introduction = _receive(listener, size, deadline, introductions)
            guests.append(guest)
            introductions[introduction.rank] = introduction
        everybody = [introductions[rank] for rank in range(size)]
        answer = msgspec.msgpack.encode(everybody)
        for guest in guests:
            socket.send_fds(guest, [struct.pack("<I", len(answer))], [memory])
            guest.sendall(answer)
        for guest in guests:  # leave only when all have it: the last byte is their goodbye
            guest.settimeout(_remaining(deadline))
            if guest.recv(1) != b"\0":
                raise ConnectionResetError("it could not map the memory")
        return everybody
    except OSError as error:
        raise RendezvousError(f"a rank went away while the group was being made: {error}") from error
    finally:
        for guest in guests:
            guest.close()


def _receive(
    listener: socket.socket, size: int, deadline: float, known: dict[int, _Introduction]
) -> tuple[socket.socket, _Introduction]:
    """The next rank that comes. Strangers (other users, garbage) are turned away."""
    while True:
        listener.settimeout(_remaining(deadline))
        try:
            guest, _ = listener.accept()
        except TimeoutError:
            raise RendezvousError(_missing(size, known)) from None
        guest.settimeout(min(2.0, _remaining(deadline)))
        try:
            if _same_user(guest):  # asked before a single byte is waited for
                introduction = msgspec.msgpack.decode(guest.recv(256), type=_Introduction)
                if 0 < introduction.rank < size:
                    return guest, introduction
        except (OSError, msgspec.DecodeError):
            pass
        guest.close()


def _same_user(peer: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _missing(size: int, known: dict[int, _Introduction]) -> str:
    missing = ", ".join(str(rank) for rank in range(size) if rank not in known)
    return message(
        f"rank {missing} did not come to the group's shared memory",
        observed=f"{len(known)} of {size} ranks",
        expected="all",
        remedy="Look at that rank's output, or raise timeout=.",
    )


# ---- the other ranks -----------------------------------------------------------------------------------


def _join(store: Store, rank: int, size: int, deadline: float) -> tuple[_native.Region, list[_Introduction]]:
    try:
        invitation = msgspec.msgpack.decode(store.get(_KEY, _remaining(deadline)), type=_Invitation)
    except StoreTimeout as error:
        raise RendezvousError(f"rank 0 did not offer its shared memory in time: {error}") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        host.settimeout(_remaining(deadline))
        try:
            _connect(host, invitation.address, deadline)
            host.sendall(msgspec.msgpack.encode(_introduction(rank)))
            length, descriptors, _, _ = socket.recv_fds(host, 4, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            text = f"rank {rank} waited for the group's shared memory, but not all ranks came to it in time"
            raise RendezvousError(text) from error
        except OSError as error:
            raise RendezvousError(_unreachable(rank, error)) from error
        if not descriptors:
            raise RendezvousError("rank 0 gave up while the group was being made; its own error tells why")
        region = _native.Region(descriptors[0], size, invitation.staging_bytes, False)
        try:
            everybody = _read(host, length)
        except OSError as error:
            raise RendezvousError(_unreachable(rank, error)) from error
        host.sendall(b"\0")
        return region, msgspec.msgpack.decode(everybody, type=list[_Introduction])


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


def _read(host: socket.socket, length: bytes) -> bytes:
    if len(length) != 4:
        raise ConnectionResetError("rank 0 closed the connection before all ranks had come")
    wanted = min(struct.unpack("<I", length)[0], _FRAME_BYTES)
    parts = bytearray()
    while len(parts) < wanted:
        piece = host.recv(wanted - len(parts))
        if not piece:
            raise ConnectionResetError("rank 0 closed the connection")
        parts += piece
    return bytes(parts)


def _unreachable(rank: int, error: OSError) -> str:
    return message(
        f"rank {rank} cannot map the memory of rank 0",
        observed=str(error),
        expected="all ranks of a group on one host and in one network namespace",
        remedy="Edges between hosts are not built yet.",
    )


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
