"""Where tests reach inside: every private name of Unisono's that a test uses stands here, once.

A test does so only for what nobody sees from outside, or for a moment that nothing from outside can hit: a
signal between two lines, a word that is lost. Who renames such a name mends this file, and no test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import unisono as un


def planner(group: un.Group) -> Any:
    """What makes and remembers a group's calls."""
    return group._planner


def engine(group: un.Group) -> Any:
    """The native object under a group."""
    return group._planner.engine


@contextmanager
def engine_replaced(group: un.Group, stand_in: Any) -> Iterator[None]:
    """Calls of the group go to `stand_in`."""
    own = planner(group)
    kept, own._engine = own.engine, stand_in
    try:
        yield
    finally:
        own._engine = kept


def remembered(group: un.Group) -> int:
    """How many calls a group remembers."""
    return len(planner(group)._prepared)


def place(group: un.Group, hosts: tuple[int, ...]) -> None:
    """Tell a group that its ranks are on these hosts."""
    group._place(hosts)


def keep(group: un.Group, work: Any) -> None:
    """Have a group look after a work, as after one that nobody waits for."""
    group._kept.keep(work)


# The adapter for PyTorch.


def group_of(process_group: Any) -> un.Group:
    """The group of Unisono's under a process group of PyTorch's."""
    made: un.Group = process_group._group
    return made


def closing(process_group: Any) -> bool:
    """Whether the futures of a process group are being ended."""
    found: bool = process_group._futures._closing
    return found


def changing(futures: Any) -> AbstractContextManager[Any]:
    """Hold the lock of futures."""
    held: AbstractContextManager[Any] = futures._changed
    return held


def barrier_store(process_group: Any) -> Any:
    """The store in which ranks say that they came to a monitored barrier."""
    return process_group._monitored._store


# Stores.


def log(store: Any) -> Any:
    """The log of a file store."""
    return store._log


def hold(store: Any, deadline: float) -> AbstractContextManager[None]:
    """Keep a file store busy."""
    held: AbstractContextManager[None] = store._held(deadline)
    return held


def replace_lock(store: Any, make: Any) -> None:
    """Give a store another lock, made of its own."""
    name = "_guard" if hasattr(store, "_guard") else "_lock"
    setattr(store, name, make(getattr(store, name)))


WAITS_FOR_OTHERS = "_await_others"
TAKES_A_CONNECTION = "_take"


def idle(store: Any) -> list[Any]:
    """The connections of a TCP store that wait for a call."""
    found: list[Any] = store._idle
    return found


def connections(store: Any) -> set[Any]:
    """The open connections of a TCP store."""
    found: set[Any] = store._open
    return found


def ask(store: Any, op: Any, payload: bytes, timeout_s: float) -> Any:
    """Make a call as if the store had been found open."""
    return store._call(op, payload, timeout_s)


def clients_seen(server: Any) -> Any:
    """The clients that a server waits for when it closes."""
    return server._loop._clients_seen


def is_ending(store: Any) -> bool:
    """Whether the server in this TCP store has begun to end."""
    return store._server is not None and store._server._loop._stop_at is not None


def waits_of(server: Any) -> tuple[int, int]:
    """How many alarms and how many waiters a server has."""
    return len(server._loop._alarms), len(server._loop._waiters)


# The launcher, and what stands beside a rank.

BEAT = "_beat"


def give_up(node: Any, number: int) -> None:
    """What a node does when another one is silent for too long."""
    node._give_up(number)


def keep_beating(node: Any) -> None:
    """What the thread of a node does."""
    node._keep_beating()


def name_hosts(node: Any, names: tuple[str, ...]) -> None:
    """What a node has learnt when all have met."""
    node._hosts = names


def drain(screen: Any) -> None:
    """What was to be printed has been."""
    screen._writer.backlog_nbytes = 0


def relay_socket(relays: Any) -> Any:
    """The connection to the process that encrypts; None as long as it was not needed."""
    return relays._control


def set_relay_socket(relays: Any, sock: Any) -> None:
    """Have a thread of this process encrypt."""
    relays._control = sock


def sane(calibration: Any) -> bool:
    """Whether some machine may have these figures."""
    from unisono.costs import machine

    return machine._sane(calibration)
