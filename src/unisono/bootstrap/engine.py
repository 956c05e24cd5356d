"""Makes the engine of a rank: who is there, the memory of its host, the connections to other hosts."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from unisono import _native
from unisono.bootstrap.failures import told
from unisono.bootstrap.liveness import Lives
from unisono.bootstrap.membership import Roster, meet, write_card
from unisono.bootstrap.memory import given_up_on_failure, memory_key, share_memory
from unisono.costs.machine import DEFAULTS, Calibration, recall
from unisono.env import Settings
from unisono.errors import StoreError
from unisono.store import Store

if TYPE_CHECKING:
    from unisono.bootstrap.sockets import Sockets

__all__ = ["EngineSettings", "Opened", "open_engine"]


class EngineSettings(msgspec.Struct, frozen=True):
    """What of the settings the engine takes.

    Attributes:
        master: a host that every rank reaches; None: unknown.
        socket_bytes: of the kernel's buffers of a connection; 0: as the kernel sees fit.
        network: interfaces and ports to use, and the job's token.
        lending: large messages within a host may go from one rank's memory straight to another's.
        placement: threads that wait may be moved to other cores of those they are allowed.
        machine: what is known of this machine; that of rank 0 counts.
    """

    staging_bytes: int
    spin_us: float
    status_fd: int
    ranks_per_host: int = 0
    peer_timeout_s: float = 10.0
    master: str | None = None
    socket_bytes: int = 0
    network: Settings = Settings()
    lending: bool = True
    placement: bool = True
    machine: Calibration = DEFAULTS

    @classmethod
    def of(cls, settings: Settings, master: str | None = None) -> EngineSettings:
        """From the environment's settings, and the master where something else names it."""
        page = 4096
        staging = max(16 * page, -(-settings.staging_bytes // page) * page)
        status_fd = -1 if settings.status_fd is None else settings.status_fd
        master = master or settings.master_addr
        if master is None and settings.store_address is not None:
            master = settings.store_address[0]
        return cls(
            staging,
            float(settings.spin_us),
            status_fd,
            settings.ranks_per_host,
            settings.peer_timeout_s,
            master,
            network=settings,
            lending=settings.lending,
            placement=settings.placement,
            machine=recall(settings).calibration,
        )


class Opened(NamedTuple):
    """An engine, the name of every rank's host, and the figures by which all ranks choose."""

    engine: _native.Engine
    hosts: tuple[str, ...]
    machine: Calibration


def open_engine(store: Store, rank: int, size: int, *, timeout_s: float, settings: EngineSettings) -> Opened:
    """The engine of `rank`, once all ranks of the group have come.

    Raises:
        RendezvousError: somebody did not come in time, ended, failed, or cannot be reached. What is
            raised here, of any kind, the others raise as this.
    """
    deadline = time.monotonic() + timeout_s
    with told(store, rank):
        card = write_card(rank, settings.ranks_per_host, settings.lending)
        roster = meet(store, card, size, deadline, settings.staging_bytes, settings.machine)
        mates = roster.mates(rank)
        with contextlib.closing(Lives(roster, mates)) as lives:
            opened = _opened(store, roster, rank, lives, deadline, settings)
    with contextlib.suppress(StoreError):  # it has gone with the rank that serves it
        _forget(store, roster)
    return opened


def _forget(store: Store, roster: Roster) -> None:
    """Count this rank as done with what was told in the store; the last one removes it."""
    size = len(roster.cards)
    if store.add("made", 1) < size:
        return
    firsts = {roster.mates(rank)[0] for rank in range(size)}
    keys = ["made", "roster", *(f"card/{rank}" for rank in range(1, size)), *map(memory_key, firsts)]
    if not roster.on_one_host():
        keys += ["endpoints", "connected", "all connected", *(f"endpoint/{rank}" for rank in range(1, size))]
    for key in keys:
        store.delete_key(key)


def _opened(
    store: Store, roster: Roster, rank: int, lives: Lives, deadline: float, settings: EngineSettings
) -> Opened:
    mates = roster.mates(rank)
    lending = _reaches_all(roster, mates)
    region = share_memory(
        store, rank, mates, lives, deadline=deadline, staging_bytes=roster.staging_bytes, lending=lending
    )
    with given_up_on_failure(region, mates.index(rank)):
        sockets = _connected(store, roster, rank, deadline, settings)
        try:
            lives.check(lambda mate: region.joined(mates.index(mate)))
            cores, segment_bytes = roster.cores(rank), roster.machine.segment_bytes
            waits = settings.spin_us, segment_bytes, settings.placement
            options = (lives.detach(), settings.status_fd, cores, *waits)
            if sockets is None:
                return Opened(_native.Engine(region, rank, *options), roster.names(), roster.machine)
            engine = _native.Engine(region, rank, *options, _connections(roster, rank, sockets))
            return Opened(engine, roster.names(), roster.machine)
        finally:
            if sockets is not None:
                sockets.close()  # what the engine has not taken over


def _connected(
    store: Store, roster: Roster, rank: int, deadline: float, settings: EngineSettings
) -> Sockets | None:
    """The connections to other hosts; None: there are none."""
    if roster.on_one_host():
        return None
    from unisono.bootstrap.connections import connect_hosts  # only here: many ranks on one host start sooner

    return connect_hosts(
        store,
        roster,
        rank,
        deadline=deadline,
        master=settings.master,
        peer_timeout_s=settings.peer_timeout_s,
        buffer_bytes=settings.socket_bytes,
        settings=settings.network,
    )


def _reaches_all(roster: Roster, mates: list[int]) -> bool:
    """Whether this rank can read the memory of all its mates, and all want it."""
    cards = [roster.cards[mate] for mate in mates]
    return all(card.landmark and _native.reaches(card.pid, card.landmark) for card in cards)


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
