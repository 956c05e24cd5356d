"""Makes the engine of a rank: who is there, the memory of its host, the connections to other hosts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unisono import _native
from unisono.backends.memory import share_memory
from unisono.backends.roster import Card, Roster, born, meet, write_card
from unisono.env import Settings
from unisono.errors import RendezvousError
from unisono.store import Store

if TYPE_CHECKING:
    from unisono.backends.tcp import Sockets

__all__ = ["EngineSettings", "Opened", "open_engine"]


@dataclass(frozen=True)
class EngineSettings:
    """What of the settings the engine takes.

    Attributes:
        master: a host that every rank reaches; None: unknown.
        socket_bytes: of the kernel's buffers of a connection; 0: as the kernel sees fit.
    """

    staging_bytes: int
    spin_us: float
    status_fd: int
    ranks_per_host: int = 0
    peer_timeout_s: float = 10.0
    master: str | None = None
    socket_bytes: int = 0
    token: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, settings: Settings) -> EngineSettings:
        """From the environment's settings."""
        page = 4096
        staging = max(16 * page, -(-settings.staging_bytes // page) * page)
        status_fd = -1 if settings.status_fd is None else settings.status_fd
        master = settings.master_addr
        if master is None and settings.store_address is not None:
            master = settings.store_address[0]
        return cls(
            staging,
            float(settings.spin_us),
            status_fd,
            settings.ranks_per_host,
            settings.peer_timeout_s,
            master,
            token=settings.token,
        )


class Opened(NamedTuple):
    """An engine, and the name of every rank's host."""

    engine: _native.Engine
    hosts: tuple[str, ...]


def open_engine(store: Store, rank: int, size: int, *, timeout_s: float, settings: EngineSettings) -> Opened:
    """The engine of `rank`, once all ranks of the group have come.

    Raises:
        RendezvousError: somebody did not come in time, or cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    card = write_card(rank, settings.ranks_per_host)
    roster = meet(store, card, size, deadline, settings.staging_bytes)
    mates = roster.mates(rank)
    region = share_memory(store, rank, mates, deadline=deadline, staging_bytes=roster.staging_bytes)
    sockets = None
    if not roster.on_one_host():
        from unisono.backends.tcp import connect_hosts  # only here: many ranks on one host start sooner

        sockets = connect_hosts(
            store,
            roster,
            rank,
            deadline=deadline,
            master=settings.master,
            peer_timeout_s=settings.peer_timeout_s,
            buffer_bytes=settings.socket_bytes,
            token=settings.token,
        )
    try:
        pidfds = _watch_all(roster, mates)
        crowd = len(mates) / roster.neighbours(rank)  # of the cores, other hosts on this machine take theirs
        cores = max(1, int(len(os.sched_getaffinity(0)) * crowd))
        options = (pidfds, settings.status_fd, cores, settings.spin_us)
        if sockets is None:
            return Opened(_native.Engine(region, rank, *options), roster.names())
        engine = _native.Engine(region, rank, *options, _connections(roster, rank, sockets))
        return Opened(engine, roster.names())
    finally:
        if sockets is not None:
            sockets.close()  # what the engine has not taken over


def _connections(roster: Roster, rank: int, sockets: Sockets) -> _native.Connections:
    mates = roster.mates(rank)
    homes = [card.home for card in roster.cards]
    return _native.Connections(
        places=[mates.index(card.rank) if card.rank in mates else -1 for card in roster.cards],
        hosts=[homes.index(home) for home in homes],
        pids=[card.pid for card in roster.cards],
        control=sockets.detach("control"),
        data=sockets.detach("data"),
        messages=sockets.detach("messages"),
    )


def _watch_all(roster: Roster, mates: list[int]) -> list[int]:
    """By rank: a descriptor that tells of its death, -1 for one elsewhere or of this very process."""
    pidfds: list[int] = []
    try:
        for card in roster.cards:
            pidfds += [_watch(card) if card.rank in mates else -1]
    except BaseException:
        for pidfd in pidfds:
            if pidfd >= 0:
                os.close(pidfd)
        raise
    return pidfds


def _watch(peer: Card) -> int:
    if peer.pid == os.getpid():
        return -1
    try:
        pidfd = os.pidfd_open(peer.pid)
        if born(peer.pid) == peer.born:
            return pidfd
        os.close(pidfd)
    except OSError:
        pass
    raise RendezvousError(f"rank {peer.rank} (pid {peer.pid}) ended while the group was being made")
