"""Makes a window: the ranks tell each other what they expose, and connect where they do not share memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from unisono import _native
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.peer_sockets import PeerSockets
from unisono.engine.store import PrefixStore, Store
from unisono.engine.store.base import close_in_children
from unisono.engine.windows.window import ExposedPart, Window, WindowOwner
from unisono.errors import GroupError

MOST_ATTACHED = 1024
"""The most pieces of memory that a rank attaches at one time."""

_LOW, _HIGH = "windows of the lower rank", "windows of the higher rank"


def open_window(
    owner: WindowOwner,
    members: Sequence[int],
    gather: Callable[[Any], list[Any]],
    array: Any,
    extent: tuple[int, int, int],
    keeps: object,
    *,
    typed: bool = True,
    dynamic: bool = False,
    meeting: tuple[Store, Identity] | None = None,
) -> Window:
    """A window of these ranks of a group; all of them call it.

    Args:
        gather: the objects of all members, in their order.
        extent: (address, bytes, dtype or -1) of this rank's memory.  keeps: what keeps it valid.
        typed: offsets count elements of the dtype; otherwise bytes.  dynamic: ranks attach and detach memory.
        meeting: where ranks that do not share memory meet, and who is in the group; None: they cannot.
    Raises:
        GroupError: ranks share no memory, and cannot connect.  RendezvousError: two cannot reach each other.
    """
    engine, size = owner.engine, owner.size
    most = MOST_ATTACHED if dynamic else 1
    cell = _cell(_native.window_cell_bytes(size, most))
    place: int = cell.__array_interface__["data"][0]
    _native.make_window_cell(engine, place, most, *extent[:2])
    parts = [ExposedPart(0, 0, 0, -1)] * size
    told = gather((os.urandom(8).hex(), place, *extent))
    for rank, (_, *part) in zip(members, told, strict=True):
        parts[rank] = ExposedPart(*part)
    reached = gather(
        [_native.reaches_window(engine, rank, parts[rank].cell, cell.nbytes) for rank in members]
    )
    direct, asking, serving = [False] * size, [-1] * size, [-1] * size
    if all(map(all, reached)):
        direct = [rank in members for rank in range(size)]
    else:
        _connect(owner, members, reached, direct, asking, serving, meeting, f"window/{told[0][0]}")
    native = _native.Window(engine, list(members), parts, direct, asking, serving, dynamic, typed)
    window = Window(owner, native, members, parts, array, (keeps, cell))
    if max(asking) >= 0:
        close_in_children(window.close_copies)
    return window


def _cell(nbytes: int) -> np.ndarray[Any, Any]:
    """Zeros that other ranks of the host can map, at an address that is a multiple of 128."""
    try:
        room = _native.shared_bytes(nbytes)
        room[:] = 0  # a system that ignores madvise gives the memory of an earlier window as that left it
        return room
    except OSError:  # the system has no such memory: all others have to connect
        room = np.zeros(nbytes + 128, np.uint8)
        return room[-room.__array_interface__["data"][0] % 128 :][:nbytes]


def _connect(
    owner: WindowOwner,
    members: Sequence[int],
    reached: list[list[bool]],
    direct: list[bool],
    asking: list[int],
    serving: list[int],
    meeting: tuple[Store, Identity] | None,
    key: str,
) -> None:
    """Fill in, by rank, whom this rank reaches, and its connections to ask and to serve the others."""
    hosts = [str(rank) for rank in members]
    if meeting is not None:
        hosts = [meeting[1].membership.peers[rank].memory_domain for rank in members]
    pairs = [(i, j) for i, host in enumerate(hosts) for j, other in enumerate(hosts) if host == other]
    if not all(reached[i][j] for i, j in pairs):  # no process may read another one: they connect, too
        hosts = [str(rank) for rank in members]
    sockets = connect_members(owner, members, hosts, meeting, key, (_LOW, _HIGH))
    low, high, own = sockets.detach(_LOW), sockets.detach(_HIGH), members.index(owner.rank)
    for i, rank in enumerate(members):
        direct[rank] = hosts[i] == hosts[own]
        asking[rank], serving[rank] = (low[i], high[i]) if own < i else (high[i], low[i])


def connect_members(
    owner: WindowOwner,
    members: Sequence[int],
    hosts: list[str],
    meeting: tuple[Store, Identity] | None,
    key: str,
    kinds: tuple[str, ...],
) -> PeerSockets:
    """Connections between those of `members` whose hosts differ; all of them call it.

    Args:
        hosts: of each member, as it counts here.  key: new in the store.
    """
    from unisono.engine.bootstrap.host_connections import connect_hosts  # not needed on one host

    if meeting is None:
        raise GroupError(f"group {owner.name!r} has no store in which its ranks could meet")
    store, identity = meeting
    settings = identity.settings
    peers = [
        msgspec.structs.replace(identity.membership.peers[rank], rank=i, memory_domain=hosts[i])
        for i, rank in enumerate(members)
    ]
    return connect_hosts(
        PrefixStore(key, store),
        msgspec.structs.replace(identity.membership, peers=peers),
        members.index(owner.rank),
        deadline=time.monotonic() + owner.seconds(None),
        master=settings.master,
        peer_timeout_s=settings.peer_timeout_s,
        buffer_bytes=settings.socket_bytes,
        settings=settings.network,
        kinds=kinds,
    )
