"""Which messages belong to which duplicate of a group."""

from __future__ import annotations

import threading
from itertools import chain
from typing import TYPE_CHECKING

from unisono import _native
from unisono.engine.operations.reduction import ReduceOp

if TYPE_CHECKING:
    from unisono.engine.group.group import Group


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
