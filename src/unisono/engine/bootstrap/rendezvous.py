"""The rendezvous of a job's ranks: find the store, agree on the rank of every process.

`init_method` says where the store is:

    env://             (default) MASTER_ADDR and MASTER_PORT; rank 0 serves the store, or the launcher does.
                       Without these two, the launcher's variables: see `launchers`
    tcp://host:port    rank 0 serves the store there
    file:///path       a file all ranks can reach

`?rank=0&world_size=2` may follow any of them. Without it, and without arguments, rank and world size come
from the environment (see `env`). Rank 0 listens on the master's address only.

Under torchrun MASTER_PORT belongs to torchrun's agent, which speaks another protocol. Rank 0 then serves on
one of sixteen ports that every rank computes from the job's identity (run id, restart count, master's address
and port). It uses the first port that it can bind. The other ranks try them in order until a server answers
that names this job; they skip ports of other programs and other jobs. See `probe_ports`.

In the store, under "unisono/meet/<name>/<generation>/" (the world's own keys: "unisono/world/..."):

    world_size       "4 rank 0 (host a, pid 17)": the first to come writes it, the others compare
    rank/2           the process of rank 2, a `ProcessInfo`; only the first write counts
    came             a counter; the rank that raises it to world_size writes the verdict
    verdict          "ok", or what is wrong; all wait for it, so all raise the same error at once. A rank
                     that gives up writes one, too: later ranks must not wait for it
    members          all members by rank; "know" counts the ranks that have read it, then "all know" is set
    bye/2            rank 2 has closed
    decided          of the store, not of one world: a verdict has been written, so the store may close

A store may be used for several worlds in succession: a rank that has closed in one generation joins the next.
Worlds of different names may meet in one store at the same time, in threads of the same processes; see
`world_names`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from unisono.engine.bootstrap import launchers
from unisono.engine.bootstrap.init_method import InitMethod, RankAndSize, find_rank_and_size, parse
from unisono.engine.bootstrap.rank_assignment import GOODBYE_S, ProcessInfo, RankAssignment
from unisono.engine.bootstrap.store_setup import open_store
from unisono.engine.environment.env import Settings
from unisono.engine.store import Store, TCPStore
from unisono.errors import StoreError

if TYPE_CHECKING:
    from unisono.engine.store import FileStore

FAILED_LINGER_S = 2.0  # for the other ranks to read the failure
ERROR_LINGER_S = 0.1  # for ranks that have not read the last keys of the start


class Rendezvous(msgspec.Struct, frozen=True):
    """A finished rendezvous.

    Attributes:
        store: for this world only; its timeout is that of the rendezvous.
        members: the process of every rank, by rank.
        master: name or address of a host that all ranks reach; None: unknown.
    """

    store: Store
    members: tuple[ProcessInfo, ...]
    rank: int
    world_size: int
    master: str | None
    _keys: Store
    _owned: TCPStore | FileStore | None

    def close(self, *, failed: bool = False) -> None:
        """Write the close message, and close the store if it was opened here. Bounded in time; never raises.

        The rank that serves the store waits up to 5 s for the close messages of the others.

        failed: an exception is under way: the others wait for the end of this process, so it does not wait
            for theirs.
        """
        with contextlib.suppress(StoreError):  # the store has ended, or is closed
            self._keys.set(f"bye/{self.rank}", b"", timeout_s=GOODBYE_S)
        if isinstance(self._owned, TCPStore):
            self._owned.close(ERROR_LINGER_S if failed else None, self.world_size)
        elif self._owned is not None:
            self._owned.close(ERROR_LINGER_S if failed else None)


def rendezvous(
    init_method: str | InitMethod | None,
    *,
    store: Store | None,
    rank: int,
    world_size: int,
    timeout_s: float,
    settings: Settings,
    name: str = "world",
) -> Rendezvous:
    """Meet the other ranks.

    Args:
        init_method: a URL as above, or a parsed one; None is "env://".
        store: an open store, instead of `init_method`. The caller closes it.
        rank, world_size: -1 takes them from the URL or the environment.
        timeout_s: seconds for the whole rendezvous.
        name: of the world; ranks of different names do not meet.
    Raises:
        ValueError: an argument, the URL or a variable is wrong.
        RendezvousError: a variable is missing, two processes have one rank, the ranks disagree on the world
            size, or a rank did not join in time (the text names the missing ranks).
        StoreError: the store cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    if store is not None and init_method is not None:
        raise ValueError("init_method and store exclude each other: give one of them")
    target = init_method if isinstance(init_method, InitMethod) else _parse_init_method(init_method, store)
    remedy, has_master = "", _has_master(settings)
    if target.scheme == "env" and settings.launcher and not has_master and settings.master_port is None:
        led = launchers.rendezvous_address(settings)
        remedy = "" if led else launchers.remedy(settings)
        target = target if led is None else msgspec.structs.replace(led, query=target.query)
    if store is None and init_method is None and world_size == 1 and rank in (-1, 0) and not has_master:
        from unisono.engine.store import HashStore

        alone, place = HashStore(timeout_s), RankAndSize(0, 1)
        return _assign_ranks(RankAssignment(alone, name, place, deadline, timeout_s), place, None)
    place = find_rank_and_size(target, rank, world_size, settings, remedy)
    job = _is_of_the_job(place, settings)
    if store is not None:
        return _assign_ranks(RankAssignment(store, name, place, deadline, timeout_s, job), place, None)
    while True:
        opened = open_store(target, place, deadline, settings)
        opened.timeout_s = timeout_s
        assignment = RankAssignment(opened, name, place, deadline, timeout_s, job)
        try:
            return _assign_ranks(assignment, place, opened, target.host or None)
        except Exception as error:
            # A fast rank may return while rank 0 is still closing the previous world's store.
            early = assignment.succeeds or not assignment.claimed
            outlived = early and place.rank > 0 and type(error) is StoreError
            served = isinstance(opened, TCPStore)
            left = FAILED_LINGER_S if served else max(0.0, deadline - time.monotonic())
            _linger(opened, min(left, FAILED_LINGER_S), place)
            if not outlived or time.monotonic() >= deadline:
                raise
        except BaseException:  # after Ctrl-C do not wait
            opened.close(linger_s=0.0)
            raise


def _is_of_the_job(place: RankAndSize, settings: Settings) -> bool:
    """Whether a place is that of this process in its job. A variable that nobody needs may be malformed."""
    with contextlib.suppress(ValueError):
        return place == (settings.rank, settings.world_size)
    return False


def _parse_init_method(init_method: str | None, store: Store | None) -> InitMethod:
    return parse(init_method) if init_method is not None else InitMethod("env" if store is None else "store")


def _has_master(settings: Settings) -> bool:
    """Whether the environment has an address. A world of one rank needs none."""
    return settings.store_address is not None or settings.master_addr is not None


def _linger(opened: TCPStore | FileStore, seconds: float, place: RankAndSize) -> None:
    """Close the store, but first give later ranks time to read the error: it is nowhere else."""
    if isinstance(opened, TCPStore):
        opened.close(linger_s=seconds, world_size=place.world_size)
    else:
        opened.close(linger_s=seconds)


def _assign_ranks(
    assignment: RankAssignment,
    place: RankAndSize,
    owned: TCPStore | FileStore | None,
    master: str | None = None,
) -> Rendezvous:
    keys, members = assignment.run()
    if isinstance(owned, TCPStore) and owned.serves:
        assignment.await_readers(keys)
    store = assignment.keys("world")
    store.timeout_s = keys.timeout_s
    return Rendezvous(store, members, *place, master, keys, owned)
