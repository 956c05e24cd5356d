"""Which process groups the Python code of a thread uses, by whatever function of torch.distributed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from unisono.engine.group.planning import WATCHES

from .probe import PrivateName, need, optional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAMES", "ranks_of", "within"]

UNSEEN = "a loss that calls collectives under a pipeline waits until its timeout"

NAMES = {
    "collectives": PrivateName(
        "torch.distributed.distributed_c10d:_rank_not_in_group",
        purpose="see which group a collective of a loss uses",
        without=UNSEEN,
    ),
    "functional": PrivateName(
        "torch.distributed._functional_collectives:_resolve_group",
        purpose="see which group a functional collective of a loss uses",
        without=UNSEEN,
    ),
    "by name": PrivateName(
        "torch.distributed.distributed_c10d:_resolve_process_group",
        purpose="find the group of a functional collective",
        without=UNSEEN,
    ),
}

MESSAGES = frozenset({"isend", "irecv", "isend_inplace", "irecv_inplace"})
QUESTIONS = ("get_", "is_", "_")
"""With these begin the names of functions that only ask for a group."""


class _User(NamedTuple):
    """What a thread may use: the ranks, and what is called where it uses others."""

    ranks: frozenset[int]
    refuse: Callable[[str, str], None]


class _Here(threading.local):
    user: _User | None = None


_here = _Here()
_lock = threading.Lock()
_plain: dict[str, Any] = {}
_users: list[_User] = []


@contextlib.contextmanager
def within(ranks: frozenset[int], refuse: Callable[[str, str], None]) -> Iterator[None]:
    """Call `refuse(collective, who)` before this thread calls a collective with other ranks than these.

    Groups of `unisono.Group` number their ranks themselves: they are too large, or accepted. Messages between
    two ranks are accepted.
    """

    def count(kind: str, size: int) -> None:
        if size > len(ranks):
            refuse(kind, f"a group of {size} ranks")

    user = _User(ranks, refuse)
    with _lock:
        _users.append(user)
        if len(_users) == 1:
            _install()
    thread = threading.get_ident()
    before, outer = _here.user, WATCHES.get(thread)
    _here.user, WATCHES[thread] = user, count
    try:
        yield
    finally:
        _here.user = before
        if outer is None:
            del WATCHES[thread]
        else:
            WATCHES[thread] = outer
        with _lock:
            _users.remove(user)
            if not _users:
                _restore()


def _install() -> None:
    for name, ranks_of in (("collectives", _ranks), ("functional", _ranks_of_resolved)):
        function = optional(NAMES[name])
        if function is not None:
            _plain[name] = function
            _put(name, _seen(function, ranks_of))


def _restore() -> None:
    for name, function in _plain.items():
        _put(name, function)


def _put(name: str, function: Any) -> None:
    module, _, attribute = NAMES[name].path.partition(":")
    setattr(sys.modules[module], attribute, function)


def _seen(plain: Any, ranks_of: Callable[[Any, Any], list[int]]) -> Any:
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        found, caller = plain(group, *arguments, **named), sys._getframe(1).f_code.co_name
        user = _here.user
        if user is not None and caller not in MESSAGES and not caller.startswith(QUESTIONS):
            others = sorted(set(ranks_of(group, found)) - user.ranks)
            if others:
                user.refuse(caller, f"ranks {', '.join(map(str, others))}")
        return found

    return call


def _ranks(group: Any, outside: Any) -> list[int]:
    return [] if outside else dist.get_process_group_ranks(group or dist.group.WORLD)


def _ranks_of_resolved(_: Any, group: Any) -> list[int]:
    return ranks_of(group)


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group of a functional collective, which may be its name."""
    found = need(NAMES["by name"])(group) if isinstance(group, str) else group
    return dist.get_process_group_ranks(found)
