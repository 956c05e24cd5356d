"""Duplicates of a group: the same ranks and engine, but messages of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

from unisono import _native
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.group.group import Group
from unisono.engine.group.membership import Former
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.native_planning import NativePlanner
from unisono.engine.operations.reduction import ReduceOp
from unisono.engine.store import Store

__all__ = ["DuplicateGroup", "MessageContexts", "duplicate"]


class MessageContexts:
    """The contexts of the duplicates of one engine: numbers from 1, see csrc/protocol/message_tag.hpp."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._last = 0
        self._lock = threading.Lock()

    def agree(self, group: Group) -> int:
        """A number that no duplicate has on any rank; all ranks call it. It comes again as late as possible.

        Raises:
            ValueError: there is none.
        """
        import numpy as np

        with self._lock:
            used = np.zeros(_native.MOST_CONTEXTS + 1, np.bool_)
            used[list(self._open)] = True
            group.all_reduce(used, ReduceOp.BOR)
            numbers = chain(range(self._last + 1, _native.MOST_CONTEXTS + 1), range(1, self._last + 1))
            self._last = next((number for number in numbers if not used[number]), 0)
            if self._last == 0:
                raise ValueError(
                    f"duplicate: all {_native.MOST_CONTEXTS} duplicates of group {group.name!r} are open; "
                    "close some, or use subgroup()"
                )
            self._open.add(self._last)
            return self._last

    def free(self, number: int) -> None:
        """A duplicate was closed."""
        self._open.discard(number)


class DuplicateGroup(NativeGroup):
    """See `Group.duplicate`."""

    def __init__(self, original: NativeGroup, planner: NativePlanner) -> None:
        self._store, self._settings, self._identity = original._store, original._settings, None
        self._former, self._attempts, self._loop = Former(), 0, None
        self._changing = threading.Lock()
        self._original = original
        Group.__init__(self, planner, planner.engine, original._hosts, original._members, None, original)

    def _meeting(self) -> tuple[Store, Identity] | None:
        return self._original._meeting()

    def _shrink(self, exclude: Sequence[int], timeout_s: float) -> NoReturn:  # noqa: ARG002
        self._refuse_membership("shrink()")


def duplicate(group: NativeGroup) -> DuplicateGroup:
    """See `Group.duplicate`."""
    original = group._original if isinstance(group, DuplicateGroup) else group
    return DuplicateGroup(original, original._planner.duplicate(original._planner.contexts.agree(group)))
