"""Partitioned messages: one that is sent when all its parts are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.progress import Operation


class Parts(Operation):
    """A message of parts under way. start: begins to send or receive the whole."""

    def __init__(self, count: int, start: Callable[[], Operation], sending: bool) -> None:
        self.count, self._start, self.sending = count, start, sending
        self._ready: set[int] = set()
        self._whole = None if sending and count else start()

    def poll(self) -> bool:
        if not self.done and self._whole is not None and self._whole.poll():
            self.source, self.tag, self.nbytes = self._whole.source, self._whole.tag, self._whole.nbytes
            self.done = True
        return self.done

    def ready(self, parts: Sequence[int]) -> None:
        """These parts may be sent."""
        for part in parts:
            if not self.sending or not 0 <= part < self.count or part in self._ready:
                raise Exception(constants.ERR_ARG, f"part {part} of {self.count}: wrong, or ready already")
            self._ready.add(part)
        if len(self._ready) == self.count and self._whole is None:
            self._whole = self._start()


class Partitioned:
    """The methods of `Prequest` for parts."""

    _operation: Any

    def _parts(self) -> Parts:
        found = self._operation()
        if not isinstance(found, Parts):
            raise Exception(constants.ERR_REQUEST, "the request has no parts, or is not under way")
        return found

    def Pready(self, partition: int) -> None:
        """A part may be sent."""
        self._parts().ready([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Parts up to and with the last may be sent."""
        self._parts().ready(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """These parts may be sent."""
        self._parts().ready(partitions)

    def Parrived(self, partition: int) -> bool:
        """Whether a part has arrived: all do at once."""
        found = self._operation()
        if found is None:
            return True
        if not isinstance(found, Parts) or not 0 <= partition < max(found.count, 1):
            raise Exception(constants.ERR_ARG, f"there is no part {partition}")
        return found.poll()
