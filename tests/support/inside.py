"""Access to internals: every private name of Unisono that a test uses is here, once.

A test uses one only for a state that the public interface does not show, or for a moment that it cannot hit,
such as a signal between two lines, or a lost message. After a rename only this file changes, and no test.
"""

from contextlib import AbstractContextManager
from typing import Any

import unisono as un


def planner(group: un.Group) -> Any:
    """The planner, which checks and remembers a group's calls."""
    return group._planner


def engine(group: un.Group) -> Any:
    """The native engine of a group."""
    return group._planner.engine


def remembered(group: un.Group) -> int:
    """The number of calls that a group remembers."""
    return len(planner(group)._prepared)


def place(group: un.Group, hosts: tuple[int, ...]) -> None:
    """Set the hosts of a group's ranks."""
    group._place(hosts)


# The adapter for PyTorch.


def group_of(process_group: Any) -> un.Group:
    """The Unisono group of a PyTorch process group."""
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
    """The store in which ranks report their arrival at a monitored barrier."""
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
    """Replace the lock of a store by one that `make` makes of it."""
    name = "_guard" if hasattr(store, "_guard") else "_lock"
    setattr(store, name, make(getattr(store, name)))


WAITS_FOR_OTHERS = "_await_others"
TAKES_A_CONNECTION = "_take"


def idle(store: Any) -> list[Any]:
    """The idle connections of a TCP store."""
    found: list[Any] = store._idle
    return found


def connections(store: Any) -> set[Any]:
    """The open connections of a TCP store."""
    found: set[Any] = store._open
    return found


def ask(store: Any, op: Any, payload: bytes, timeout_s: float) -> Any:
    """Make a call without the check that the store is open."""
    return store._call(op, payload, timeout_s)


def clients_seen(server: Any) -> Any:
    """The clients that a server waits for when it closes."""
    return server._loop._clients_seen


def is_ending(store: Any) -> bool:
    """Whether the server in this TCP store has begun to end."""
    return store._server is not None and store._server._loop._stop_at is not None


def waits_of(server: Any) -> tuple[int, int]:
    """The numbers of alarms and of waiters of a server."""
    return len(server._loop._alarms), len(server._loop._waiters)


# The launcher, and the helpers of a rank.

BEAT = "_beat"


def give_up(node: Any, number: int) -> None:
    """The action of a node when another one is silent for too long."""
    node._give_up(number)


def keep_beating(node: Any) -> None:
    """The body of a node's thread."""
    node._keep_beating()


def relay_socket(relays: Any) -> Any:
    """The connection to the process that encrypts; None until it is needed."""
    return relays._control


def set_relay_socket(relays: Any, sock: Any) -> None:
    """Let a thread of this process encrypt."""
    relays._control = sock


# The environment and the stores.


def table(*variables: Any) -> Any:
    """The table of these variables."""
    from unisono.engine.environment import env

    return env._table(*variables)


def called_in_children() -> list[Any]:
    """The methods that a forked child calls."""
    from unisono.engine.store import base

    return list(base._forgets)
