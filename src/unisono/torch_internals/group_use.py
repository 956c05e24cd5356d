"""Which process groups the Python code of a thread uses, by whatever function of torch.distributed."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.engine.group.planning import WATCH

from .probe import PrivateName, need, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NAMES", "watched"]

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

_lock = threading.Lock()
_plain: dict[str, Any] = {}
_users = 0


@contextlib.contextmanager
def watched(check: Callable[[str, tuple[int, ...]], None]) -> Iterator[None]:
    """Call `check(name, ranks)` before this thread calls a collective: its name, and the ranks of the group.

    It may raise. Groups of `unisono.Group` count, too; messages between two ranks do not.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _install()
    before, WATCH.check = WATCH.check, check
    try:
        yield
    finally:
        WATCH.check = before
        with _lock:
            _users -= 1
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
        if WATCH.check is not None and caller not in MESSAGES and not caller.startswith(QUESTIONS):
            WATCH.check(caller, tuple(ranks_of(group, found)))
        return found

    return call


def _ranks(group: Any, outside: bool) -> list[int]:
    return [] if outside else dist.get_process_group_ranks(group or dist.group.WORLD)


def _ranks_of_resolved(_: Any, group: Any) -> list[int]:
    found = need(NAMES["by name"])(group) if isinstance(group, str) else group
    return dist.get_process_group_ranks(found)
