"""The messages of a group on their way to its engine."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from unisono import _native
from unisono.engine.group.arguments import OBJECT_FORM, MessageArguments
from unisono.engine.group.planning import Planner
from unisono.engine.group.work import MessageWork
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES
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


P = TypeVar("P", bound="MessagePlanner")
_OBJECT = DTYPES.index("uint8") | OBJECT_FORM
_BYTES = DTYPES.index("bits8")


class MessagePlanner(Planner[_native.Engine]):
    """Makes the works of messages for an engine.

    Attributes:
        dropped_messages: the buffers of messages under way whose works the program has dropped.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dropped_messages = _native.DroppedMessages()

    @property
    def engine(self) -> _native.Engine:
        """The engine. Raises GroupClosed: the group was closed."""
        return self.runner

    @cached_property
    def contexts(self) -> MessageContexts:
        """The contexts of the group's duplicates; most groups have none."""
        return MessageContexts()

    def duplicate(self: P, context: int) -> P:
        """The planner of a duplicate, whose messages have this context."""
        made = copy(self)
        made.name, made.context = f"{self.name}+{context}", context
        made.most_tag = _native.MOST_CONTEXT_TAG
        made.forget()
        return made

    @abstractmethod
    def forget(self) -> None:
        """Begin a memory of prepared calls of its own: `drop` clears it."""

    def travelling(self, tag: int) -> int:
        """The number by which the engine knows a tag of this group."""
        return _native.tag_in_context(self.context, tag) if self.context else tag

    def message(self, transfer: MessageArguments) -> MessageWork:
        """See `Planner.message`."""
        name, dtype, form = transfer.name, transfer.dtype, transfer.form
        if form is None:
            form = dtype | (OBJECT_FORM if name.endswith("_object") else 0)
        place = transfer.rank, self.travelling(transfer.tag), form
        memory = transfer.address, transfer.numel * ITEMSIZES[dtype]
        work: Any = _native.NativeMessageWork(
            self,
            self.engine,
            name,
            *place,
            *memory,
            self.seconds(transfer.timeout),
            sending=not transfer.receiving,
            exact=transfer.exact,
            keep=transfer.keep,
            synchronous=transfer.synchronous,
            unpack=transfer.unpack,
        )
        if name in ("isend", "irecv", "batch"):  # of others the caller's frame exists when an error needs it
            work.outlive_call()
        made: MessageWork = work
        return made

    def sized_message(
        self, name: str, rank: int, tag: int, timeout_s: float, decode: Callable[[Any], Any] | None
    ) -> MessageWork:
        """See `Planner.sized_message`."""
        form = _native.ANY_FORM if decode is None else _OBJECT
        place = rank, self.travelling(tag), form, 0, 0, timeout_s
        work: Any = _native.NativeMessageWork(
            self, self.engine, name, *place, sending=False, sized=True, decode=decode
        )
        work.outlive_call()
        made: MessageWork = work
        return made

    def refuse_shared_memory(self, name: str, address: int, nbytes: int) -> None:
        """See `Planner.refuse_shared_memory`."""
        place = self.rank, 0, _BYTES, address, nbytes, 1.0
        _native.NativeMessageWork(self, self.engine, name, *place, sending=True).refuse_shared_memory()
