"""Makes the engine of a rank: membership, the memory of its host, the connections to other hosts."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from unisono import _native
from unisono.engine.bootstrap.failures import reported
from unisono.engine.bootstrap.liveness import Liveness, board
from unisono.engine.bootstrap.membership import Membership, meet, write_card
from unisono.engine.bootstrap.memory import given_up_on_failure, memory_key, share_memory
from unisono.engine.costs.machine import DEFAULTS, Calibration, recall
from unisono.engine.environment.env import Settings
from unisono.engine.store import Store
from unisono.errors import StoreError

if TYPE_CHECKING:
    from unisono.engine.bootstrap.sockets import Sockets

__all__ = ["EngineSettings", "Opened", "connections_of", "open_engine"]


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings of the engine.

    Attributes:
        master: a host that every rank reaches; None: unknown.
        socket_bytes: size of the kernel's buffers of a connection; 0: the kernel's choice.
        network: interfaces and ports to use, and the job's token.
        lending: large messages within a host may go from one rank's memory straight to another's.
        placement: waiting threads may move to another of their allowed cores.
        machine: the calibration of this machine; that of rank 0 counts.
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
        """From the environment's settings; master: if it does not come from there."""
        page = 4096
        staging = max(16 * page, -(-settings.staging_bytes // page) * page)
        master = master or settings.master_addr
        if master is None and settings.store_address is not None:
            master = settings.store_address[0]
        return cls(
            staging,
            float(settings.spin_us),
            board(settings.status_fd),
            settings.ranks_per_host,
            settings.peer_timeout_s,
            master,
            network=settings,
            lending=settings.lending,
            placement=settings.placement,
            machine=recall(settings).calibration,
        )


class Opened(NamedTuple):
    """An engine, the name of every rank's host, the calibration that all ranks use, and who the ranks are."""

    engine: _native.Engine
    hosts: tuple[str, ...]
    machine: Calibration
    membership: Membership


def open_engine(store: Store, rank: int, size: int, *, timeout_s: float, settings: EngineSettings) -> Opened:
    """The engine of `rank`, after all ranks of the group have joined.

    Raises:
        RendezvousError: a rank did not join in time, ended, failed, or cannot be reached. An error of any
            kind on one rank is this error on the others.
    """
    deadline = time.monotonic() + timeout_s
    with reported(store, rank):
        card = write_card(rank, settings.ranks_per_host, settings.lending)
        membership = meet(store, card, size, deadline, settings.staging_bytes, settings.machine)
        local_ranks = membership.local_ranks(rank)
        with contextlib.closing(Liveness(membership, local_ranks)) as liveness:
            opened = _opened(store, membership, rank, liveness, deadline, settings)
    with contextlib.suppress(StoreError):  # the rank that serves the store has ended
        _forget(store, membership)
    return opened


def _forget(store: Store, membership: Membership) -> None:
    """Count this rank as finished with the keys of this group; the last rank deletes them."""
    size = len(membership.cards)
    if store.add("made", 1) < size:
        return
    firsts = {membership.local_ranks(rank)[0] for rank in range(size)}
    keys = ["made", "membership", *(f"card/{rank}" for rank in range(1, size)), *map(memory_key, firsts)]
    if not membership.on_one_host():
        keys += ["endpoints", "connected", "all connected", *(f"endpoint/{rank}" for rank in range(1, size))]
    for key in keys:
        store.delete_key(key)


def _opened(
    store: Store,
    membership: Membership,
    rank: int,
    liveness: Liveness,
    deadline: float,
    settings: EngineSettings,
) -> Opened:
    local_ranks = membership.local_ranks(rank)
    lending = _reaches_all(membership, local_ranks)
    region = share_memory(
        store,
        rank,
        local_ranks,
        liveness,
        deadline=deadline,
        staging_bytes=membership.staging_bytes,
        lending=lending,
    )
    with given_up_on_failure(region, local_ranks.index(rank)):
        sockets = _connected(store, membership, rank, deadline, settings)
        try:
            liveness.check(lambda other: region.joined(local_ranks.index(other)))
            cores, segment_bytes = membership.cores(rank), membership.machine.segment_bytes
            waits = settings.spin_us, segment_bytes, settings.placement
            options = (liveness.detach(), settings.status_fd, cores, *waits)
            if sockets is None:
                engine = _native.Engine(region, rank, *options)
            else:
                held = [sockets.detach(kind) for kind in ("control", "data", "messages")]
                engine = _native.Engine(region, rank, *options, connections_of(membership, rank, *held))
            return Opened(engine, membership.names(), membership.machine, membership)
        finally:
            if sockets is not None:
                sockets.close()  # those that the engine has not taken over


def _connected(
    store: Store, membership: Membership, rank: int, deadline: float, settings: EngineSettings
) -> Sockets | None:
    """The connections to other hosts; None: there are none."""
    if membership.on_one_host():
        return None
    from unisono.engine.bootstrap.connections import (
        connect_hosts,
    )  # imported late: ranks on one host start faster

    return connect_hosts(
        store,
        membership,
        rank,
        deadline=deadline,
        master=settings.master,
        peer_timeout_s=settings.peer_timeout_s,
        buffer_bytes=settings.socket_bytes,
        settings=settings.network,
    )


def _reaches_all(membership: Membership, local_ranks: list[int]) -> bool:
    """Whether this rank can read the memory of all ranks of its host, and all allow it."""
    cards = [membership.cards[other] for other in local_ranks]
    return all(card.landmark and _native.reaches(card.pid, card.landmark) for card in cards)


def connections_of(
    membership: Membership, rank: int, control: list[int], data: list[int], messages: list[int]
) -> _native.Connections:
    """How `rank` is connected with the others, by the descriptors of its connections; it takes them over."""
    local_ranks = membership.local_ranks(rank)
    homes = [card.home for card in membership.cards]
    return _native.Connections(
        places=[
            local_ranks.index(card.rank) if card.rank in local_ranks else -1 for card in membership.cards
        ],
        hosts=[homes.index(home) for home in homes],
        pids=[card.pid for card in membership.cards],
        control=control,
        data=data,
        messages=messages,
    )
