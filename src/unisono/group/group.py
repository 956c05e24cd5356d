"""`Group`, and the two ways to one: meeting by URL or environment, and over an open store."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from unisono import _native, env
from unisono.backends.native import EngineSettings, open_engine
from unisono.choose import Choice
from unisono.errors import GroupError, RendezvousError, message
from unisono.group import faults
from unisono.group.calls import Caller
from unisono.group.collectives import Collectives
from unisono.group.methods import methods
from unisono.group.objects import Objects
from unisono.group.parting import uncaught, why
from unisono.group.work import seconds
from unisono.machine import DEFAULTS, Calibration
from unisono.rendezvous import Rendezvous, rendezvous
from unisono.store import PrefixStore, Store

__all__ = ["Group", "connect", "init_process_group"]


class Group(Objects):
    """Ranks that communicate. Made by `init_process_group`; also a context manager that closes it.

    There is no hidden default group: the group is the object you call. Several threads may use it;
    their operations are run one after the other, and all ranks must then agree on the order.

    Attributes:
        rank: of this process, 0..size-1.  size: number of ranks.  name: for error texts.
        timeout_s: seconds for an operation that names no timeout of its own.
        reproducible: all reductions are, as if each were called with reproducible=True; set it on all ranks.
        sequence: collectives issued by this rank up to now, those under way included.

    An error of an operation nobody waits for is not lost: it has aborted the group, and the next call
    raises it.
    """

    def __init__(
        self,
        engine: _native.Engine,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        store: Store | None = None,
        meeting: Rendezvous | None = None,
        members: tuple[int, ...] | None = None,
        reproducible: bool = False,
        hosts: tuple[str, ...] = (),
        machine: Calibration = DEFAULTS,
    ) -> None:
        self._hosts = hosts or (os.uname().nodename,) * size
        self._caller = Caller(engine, name, rank, size, timeout_s, self._hosts, reproducible, machine)
        self._store = store
        self._meeting = meeting
        self._members = tuple(range(size)) if members is None else members
        self._subgroups = 0
        # Held by this object and by its native methods: the group goes when nobody is left who can call it.
        self._hold = Collectives()
        self._hold._caller = self._caller
        vars(self).update(methods(self._hold, type(self)))
        # At exit, too, the others must learn that this rank has gone, and no thread may be left.
        self._finalizer = weakref.finalize(self._hold, _end, self._caller, meeting, os.getpid())

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._caller.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._caller.size

    @property
    def name(self) -> str:
        """The group's name, as error texts say it."""
        return self._caller.name

    @property
    def timeout_s(self) -> float:
        """Seconds an operation may take that names no timeout of its own."""
        return self._caller.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | timedelta) -> None:
        self._caller.timeout_s = seconds(value, 0.0)

    @property
    def sequence(self) -> int:
        """How many collectives this rank has called, asynchronous ones included. Equal numbers are one call.

        Raises:
            GroupClosed: the group was closed.
        """
        return self._caller.engine.issued

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    @property
    def reproducible(self) -> bool:
        """Whether all reductions combine contributions in the order of ranks."""
        return self._caller.reproducible

    @reproducible.setter
    def reproducible(self, value: bool) -> None:
        self._caller.reproducible = value

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the world that form this group: members[i] is what rank i of the group is there."""
        return self._members

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of this group's ranks, in the order given; None on the ranks that are not in it.

        Every rank of this group calls it, with the same ranks. The new group has an order of operations of
        its own, and is closed on its own.

        Example (p=4): subgroup([2, 0]) is a group on ranks 0 and 2, whose ranks there are 1 and 0.
        """
        chosen = tuple(ranks)
        self._check_ranks(chosen)
        self._subgroups += 1
        name = f"{self.name}/{self._subgroups}"
        if self.rank not in chosen:
            return None
        if self._store is None:
            raise GroupError(f"group {self.name!r} has no store in which a subgroup could meet")
        members = tuple(self._members[rank] for rank in chosen)
        room = PrefixStore(f"subgroup/{self._subgroups}/{'_'.join(map(str, chosen))}", self._store)
        place = chosen.index(self.rank)
        try:
            return connect(
                room,
                place,
                len(chosen),
                name=name,
                timeout_s=self.timeout_s,
                members=members,
                reproducible=self.reproducible,
            )
        except RendezvousError as error:
            where = f"subgroup({list(chosen)}) of group {self.name!r}, ranks numbered as in it"
            raise RendezvousError(f"{where}: {error}") from None

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Cut this group into one group for every `color`; None for a rank whose color is None.

        Ranks of the new groups are in the order of `key`, then of their ranks here. Every rank calls it.

        Example (p=4): split(rank % 2) makes groups of ranks 0, 2 and of ranks 1, 3.
        """
        wishes = self.all_gather_object((color, key))
        colors = sorted({wish[0] for wish in wishes if wish[0] is not None})
        mine: Group | None = None
        first = self._subgroups
        try:
            for one in colors:  # everybody makes all of them, so that everybody counts alike
                chosen = [rank for rank, wish in enumerate(wishes) if wish[0] == one]
                group = self.subgroup(sorted(chosen, key=lambda rank: (wishes[rank][1], rank)))
                mine = mine or group
        finally:
            self._subgroups = first + len(colors)  # also where one of them, or the wait for it, failed
        return mine

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"subgroup: ranks are {list(ranks)}, expected at least one, each once")
        for rank in ranks:
            if not 0 <= rank < self.size:
                raise ValueError(f"subgroup: rank {rank} is not in group {self.name!r} of {self.size} ranks")

    def host_of(self, rank: int) -> str:
        """The name of the host a rank runs on. Ranks have one host when they share memory; two hosts of one
        name are told apart: "node", "node#2".
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in group {self.name!r} of {self.size} ranks")
        return self._hosts[rank]

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> Choice:
        """Which algorithm a collective takes here, and how long it should take by the cost model.

        Args:
            nbytes: of the whole buffer; of the larger one where input and output differ.
            algorithm: the one to price; None: the one that is taken.
        Raises:
            ValueError: there is no such collective or algorithm.
        """
        return self._caller.choice(collective, nbytes, algorithm)

    def last_seen(self, rank: int) -> str:
        """Where a rank was, as error texts say it: "in barrier #40", "after barrier #40"."""
        return faults.last_seen(self._caller.scene(self._caller.engine, "", 0.0), rank)

    def abort(self) -> None:
        """End every operation of the group, on every rank, with an error; then only `close` works."""
        self._caller.engine.abort()

    def close(self) -> None:
        """Leave the group. Never blocks for long, always works, may be called twice.

        What this rank has sent can still be received. A rank that waits for more from it gets `PeerLost`,
        which tells of the exception that is under way here, if one is.
        """
        self._leave(sys.exc_info()[1])

    def _leave(self, error: BaseException | None) -> None:
        alive = self._finalizer.detach()
        if alive is not None:
            _, _, (caller, meeting, pid), _ = alive
            _close(caller, meeting, pid, error)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; when the block ended well, raise the error of asynchronous work that nobody heard of."""
        unheard = self._caller.unheard() if kind is None else None
        self._leave(error)  # not what a handler around the block has caught before
        if unheard is not None:
            raise unheard

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank} of {self.size}"
        return f"<Group {self.name!r}: {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Group belongs to one process and cannot be pickled")


def _end(caller: Caller, meeting: Rendezvous | None, pid: int) -> None:
    """Close a group that nobody has closed: it was forgotten, or the program ends."""
    _close(caller, meeting, pid, uncaught())


def _close(caller: Caller, meeting: Rendezvous | None, pid: int, error: BaseException | None) -> None:
    if os.getpid() != pid:  # a fork's copy: the parent's group is not the child's to leave
        caller.abandon()
        return
    cause = ""
    try:
        cause = why(error)
    finally:  # whatever becomes of it, as by Ctrl-C
        try:
            caller.leave(cause)
        finally:
            if meeting is not None:
                meeting.close()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "world",
    reproducible: bool = False,
) -> Group:
    """Meet the other ranks and form a group with them.

    Args:
        backend: None or "native", the only one yet.
        init_method: `env://` (default), `tcp://host:port` or `file:///path`; excludes `store`.
        timeout: seconds for the meeting and for every operation; default UNISONO_TIMEOUT_S, 300 s.
        world_size, rank: -1 takes them from the URL or the environment.
        store: an open store to meet in; it stays the caller's.
        group_name: appears in error texts.
        reproducible: of the group and its subgroups, see `Group`.
    Raises:
        ValueError: an argument, the URL or an environment variable is wrong.
        RendezvousError: the ranks did not come together; says who is missing.
    """
    if backend not in (None, "native"):
        raise ValueError(_other_backend(backend))
    settings = env.read()
    if settings.launcher != "unisono run":  # which has said it once for all ranks
        for text in env.unknown():
            warnings.warn(text, stacklevel=2)
    timeout_s = seconds(timeout, settings.timeout_s)
    meeting = rendezvous(
        init_method, store=store, rank=rank, world_size=world_size, timeout_s=timeout_s, settings=settings
    )
    try:
        opened = open_engine(
            meeting.store,
            meeting.rank,
            meeting.world_size,
            timeout_s=timeout_s,
            settings=EngineSettings.of(settings, meeting.master),
        )
    except BaseException:
        meeting.close()
        raise
    return Group(
        opened.engine,
        meeting.rank,
        meeting.world_size,
        group_name,
        timeout_s,
        meeting.store,
        meeting,
        reproducible=reproducible,
        hosts=opened.hosts,
        machine=opened.machine,
    )


def _other_backend(backend: object) -> str:
    torchs = backend in ("gloo", "nccl", "mpi", "unisono")
    where = "a backend of torch.distributed" if torchs else "no backend"
    remedy = (
        f"Leave backend out; for PyTorch's API write torch.distributed.init_process_group({backend!r})"
        + (", after `import unisono.torch`." if backend == "unisono" else ".")
        if torchs
        else "Leave backend out."
    )
    return message(
        f"unisono.init_process_group has one backend, 'native', and {backend!r} is {where}", remedy=remedy
    )


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str = "world",
    timeout_s: float | None = None,
    members: tuple[int, ...] | None = None,
    reproducible: bool = False,
) -> Group:
    """A group of ranks that already share a store and know their numbers. The store stays the caller's.

    Everything is kept under the prefix `name`, which therefore must be new in the store.
    """
    settings = env.read()
    timeout_s = settings.timeout_s if timeout_s is None else timeout_s
    room = PrefixStore(name, store)
    opened = open_engine(room, rank, size, timeout_s=timeout_s, settings=EngineSettings.of(settings))
    return Group(
        opened.engine,
        rank,
        size,
        name,
        timeout_s,
        room,
        members=members,
        reproducible=reproducible,
        hosts=opened.hosts,
        machine=opened.machine,
    )
