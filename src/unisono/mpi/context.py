"""The contexts of communicators: numbers that keep their messages apart, on which their ranks agree."""

from __future__ import annotations

from typing import Any

from unisono._native import MOST_CONTEXTS
from unisono.mpi import constants, object_schedules
from unisono.mpi.errors import Exception
from unisono.mpi.lane import Lane
from unisono.mpi.progress import Schedule

_CONTEXTS = (MOST_CONTEXTS - 1) // 2
"""Each communicator has two: for its program's messages, and for its collectives."""
WORLD_CONTEXT, SELF_CONTEXT = 0, 1


class Contexts:
    """Which contexts this rank uses, and the number of the newest communicator that it knows of."""

    def __init__(self) -> None:
        self._free = (1 << _CONTEXTS) - 1 & ~0b11
        self._serial = 0

    def offer(self) -> tuple[int, int]:
        """What this rank tells the others: (free contexts, newest number)."""
        return self._free, self._serial

    def take(self, offers: list[tuple[int, int]]) -> tuple[int, int]:
        """(the lowest context that is free on all ranks, a new number)."""
        free = self._free
        for theirs, _ in offers:
            free &= theirs
        if free == 0:
            raise Exception(constants.ERR_NO_MEM, f"{_CONTEXTS} communicators are in use; free some")
        context = (free & -free).bit_length() - 1
        self._free &= ~(1 << context)
        self._serial = max(self._serial, *(serial for _, serial in offers)) + 1
        return context, self._serial

    def give_back(self, context: int) -> None:
        """A communicator was freed."""
        if context > SELF_CONTEXT:
            self._free |= 1 << context


def agree(lane: Lane, contexts: Contexts, payload: Any = None) -> Schedule:
    """Agree on a context. Returns (what each rank has given, context, number of the communicator)."""
    told = yield from object_schedules.all_gather(lane, (payload, *contexts.offer()))
    context, serial = contexts.take([one[1:] for one in told])
    return [one[0] for one in told], context, serial
