"""Makes the engine of a rank: membership, the memory of its host, the connections to other hosts."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from unisono import _native
from unisono.engine.bootstrap.failures import reported_failures
from unisono.engine.bootstrap.liveness import LivenessMonitor, board
from unisono.engine.bootstrap.peer_info import Membership, exchange_peer_info, local_peer_info
from unisono.engine.bootstrap.shared_memory import abort_on_failure, memory_key, share_memory
from unisono.engine.bootstrap.stack_file import publish_stack
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration, recall
from unisono.engine.environment.env import Settings
from unisono.engine.store import Store
from unisono.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.engine.bootstrap.peer_sockets import PeerSockets


FORGET_S = 0.5
"""For the store to delete what is not needed any more."""


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings of the engine.

    Attributes:
        master: a host that every rank reaches; None: unknown.
        socket_bytes: size of the kernel's buffers of a connection; 0: the kernel's choice.
        network: interfaces and ports to use, and the job's token.
        zero copy: large messages within a host may go from one rank's memory straight to another's.
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
    zero_copy: bool = True
    placement: bool = True
    machine: MachineCalibration = DEFAULTS

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
            zero_copy=settings.zero_copy,
            placement=settings.placement,
            machine=recall(settings).calibration,
        )


class EngineSetup(NamedTuple):
    """An engine, the name of every rank's host, the calibration that all ranks use, and who the ranks are."""

    engine: _native.Engine
    hosts: tuple[str, ...]
    machine: MachineCalibration
    membership: Membership


def open_engine(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    settings: EngineSettings,
    served: Callable[[], bool] | None = None,
) -> EngineSetup:
    """The engine of `rank`, after all ranks of the group have joined.

    Args:
        served: whether the rank that serves the store is still there. None: rank 0 of this group serves it.

    Raises:
        RendezvousError: a rank did not join in time, ended, failed, or cannot be reached. An error of any
            kind on one rank is this error on the others.
    """
    deadline = time.monotonic() + timeout_s
    with reported_failures(store, rank):
        info = local_peer_info(rank, settings.ranks_per_host, settings.zero_copy)
        membership = exchange_peer_info(store, info, size, deadline, settings.staging_bytes, settings.machine)
        local_ranks = membership.local_ranks(rank)
        with contextlib.closing(LivenessMonitor(membership, local_ranks, rank)) as liveness:
            opened = _make_engine(store, membership, rank, liveness, deadline, settings)
    engine = opened.engine
    with contextlib.suppress(StoreError):  # the rank that serves the store has ended just now
        _forget(store, membership, served or (lambda: engine.fault_unless_alive([0], 1, False) is None))
    return opened


def _forget(store: Store, membership: Membership, served: Callable[[], bool]) -> None:
    """Count this rank as finished with the keys of this group; the last rank deletes them.

    The group is made: a store that does not answer any more, because its rank is stopped, must not delay it.
    A short program's rank 0 may leave before the others come here. Its store ends with it, and PyTorch's
    prints a trace of C++ for every call that then fails.
    """
    size = len(membership.peers)
    if not served() or store.add("made", 1, FORGET_S) < size:
        return
    firsts = {membership.local_ranks(rank)[0] for rank in range(size)}
    keys = ["made", "membership", *(f"peer_info/{rank}" for rank in range(1, size)), *map(memory_key, firsts)]
    if not membership.on_one_host():
        keys += ["endpoints", "connected", "all connected", *(f"endpoint/{rank}" for rank in range(1, size))]
    for key in keys:
        if not served():
            return
        store.delete_key(key, FORGET_S)


def _make_engine(
    store: Store,
    membership: Membership,
    rank: int,
    liveness: LivenessMonitor,
    deadline: float,
    settings: EngineSettings,
) -> EngineSetup:
    publish_stack()
    local_ranks = membership.local_ranks(rank)
    zero_copy = _reaches_all(membership, local_ranks)
    region = share_memory(
        store,
        rank,
        local_ranks,
        liveness,
        deadline=deadline,
        staging_bytes=membership.staging_bytes,
        zero_copy=zero_copy,
    )
    with abort_on_failure(region, local_ranks.index(rank)):
        sockets = _connect(store, membership, rank, deadline, settings)
        try:
            liveness.check(lambda other: region.joined(local_ranks.index(other)))
            cores, segment_bytes = membership.cores(rank), membership.machine.segment_bytes
            waits = settings.spin_us, segment_bytes, settings.placement
            options = (liveness.detach(), settings.status_fd, cores, *waits)
            pids = membership.pids()
            if sockets is None:
                engine = _native.Engine(region, rank, *options, pids=pids)
            else:
                held = [sockets.detach(kind) for kind in ("control", "data", "messages")]
                joined = connections_of(membership, rank, *held)
                engine = _native.Engine(region, rank, *options, joined, pids)
            return EngineSetup(engine, membership.names(), membership.machine, membership)
        finally:
            if sockets is not None:
                sockets.close()  # those that the engine has not taken over


def _connect(
    store: Store, membership: Membership, rank: int, deadline: float, settings: EngineSettings
) -> PeerSockets | None:
    """The connections to other hosts; None: there are none."""
    if membership.on_one_host():
        return None
    from unisono.engine.bootstrap.host_connections import (
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
    peers = [membership.peers[other] for other in local_ranks]
    return all(info.access_probe and _native.reaches(info.pid, info.access_probe) for info in peers)


def connections_of(
    membership: Membership, rank: int, control: list[int], data: list[int], messages: list[int]
) -> _native.Connections:
    """How `rank` is connected with the others, by the descriptors of its connections; it takes them over."""
    local_ranks = membership.local_ranks(rank)
    homes = [info.memory_domain for info in membership.peers]
    return _native.Connections(
        places=[
            local_ranks.index(info.rank) if info.rank in local_ranks else -1 for info in membership.peers
        ],
        hosts=[homes.index(home) for home in homes],
        control=control,
        data=data,
        messages=messages,
    )
