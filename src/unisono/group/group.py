"""`Group`, and the two ways to one: meeting by URL or environment, and over an open store."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from types import TracebackType
from typing import Any

from unisono import _native, env
from unisono.backends.native import EngineSettings, open_engine
from unisono.group.calls import Caller
from unisono.group.objects import Objects
from unisono.group.work import seconds
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
    """

    def __init__(
        self,
        engine: _native.Engine,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        meeting: Rendezvous | None,
    ) -> None:
        self._caller = Caller(engine, name, rank, size, timeout_s)
        self._meeting = meeting
        # At exit, too, the others must learn that this rank has gone, and no thread may be left.
        self._finalizer = weakref.finalize(self, _close, self._caller, meeting, os.getpid())

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
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def host_of(self, rank: int) -> str:
        """The name of the host a rank runs on."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in group {self.name!r} of {self.size} ranks")
        return self._meeting.members[rank].host if self._meeting is not None else os.uname().nodename

    def abort(self) -> None:
        """End every operation of the group, on every rank, with an error; then only `close` works."""
        self._caller.engine.abort()

    def close(self) -> None:
        """Leave the group. Never blocks for long, always works, may be called twice.

        What this rank has sent can still be received. A rank that waits for more from it gets `PeerLost`.
        """
        self._finalizer()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank} of {self.size}"
        return f"<Group {self.name!r}: {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Group belongs to one process and cannot be pickled")


def _close(caller: Caller, meeting: Rendezvous | None, pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy: the parent's group is not the child's to leave
        return
    caller.leave()
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
) -> Group:
    """Meet the other ranks and form a group with them.

    Args:
        backend: None or "native", the only one yet.
        init_method: `env://` (default), `tcp://host:port` or `file:///path`; excludes `store`.
        timeout: seconds for the meeting and for every operation; default UNISONO_TIMEOUT_S, 300 s.
        world_size, rank: -1 takes them from the URL or the environment.
        store: an open store to meet in; it stays the caller's.
        group_name: appears in error texts.
    Raises:
        ValueError: an argument, the URL or an environment variable is wrong.
        RendezvousError: the ranks did not come together; says who is missing.
    """
    if backend not in (None, "native"):
        raise ValueError(f"backend is {backend!r}, expected None or 'native'")
    settings = env.read()
    timeout_s = seconds(timeout, settings.timeout_s)
    meeting = rendezvous(
        init_method, store=store, rank=rank, world_size=world_size, timeout_s=timeout_s, settings=settings
    )
    try:
        engine = open_engine(
            meeting.store,
            meeting.rank,
            meeting.world_size,
            timeout_s=timeout_s,
            settings=EngineSettings.of(settings),
        )
    except BaseException:
        meeting.close()
        raise
    return Group(engine, meeting.rank, meeting.world_size, group_name, timeout_s, meeting)


def connect(
    store: Store, rank: int, size: int, *, name: str = "world", timeout_s: float | None = None
) -> Group:
    """A group of ranks that already share a store and know their numbers. The store stays the caller's.

    Everything is kept under the prefix `name`, which therefore must be new in the store.
    """
    settings = env.read()
    timeout_s = settings.timeout_s if timeout_s is None else timeout_s
    engine = open_engine(
        PrefixStore(name, store), rank, size, timeout_s=timeout_s, settings=EngineSettings.of(settings)
    )
    return Group(engine, rank, size, name, timeout_s, None)
