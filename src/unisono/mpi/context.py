"""The contexts of communicators: numbers that keep their messages apart, on which their ranks agree.

Several agreements may be under way on a rank, of threads or of requests. Each holds what it offers, so what
it takes is not another's. Each begins elsewhere, so they meet only when few contexts are left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from unisono._native import MOST_CONTEXTS
from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.progress import Schedule

_CONTEXTS = (MOST_CONTEXTS - 1) // 2
"""Each communicator has two: for its program's messages, and for its collectives."""
WORLD_CONTEXT, SELF_CONTEXT, PARENT_CONTEXT = 0, 1, 2
_FIRST_OFFER, _GROWTH, _ATTEMPTS = 4, 4, 24
_SPREAD = 1597  # no divisor of it divides _CONTEXTS: neighbouring keys begin far from each other


class Contexts:
    """Which contexts this rank uses, and how often it has used each."""

    def __init__(self, last: int = SELF_CONTEXT) -> None:
        """The contexts to `last` are in use from the beginning."""
        self._guard = threading.Lock()
        self._free = set(range(last + 1, _CONTEXTS))
        self._uses: dict[int, int] = {}
        self._held = 0

    def hold(self, first: int, count: int) -> tuple[dict[int, int], bool]:
        """(contexts and how often each was used, whether there may be more): held until `settle`."""
        held: dict[int, int] = {}
        with self._guard:
            for one in itertools.chain(range(first, _CONTEXTS), range(first)):
                if one in self._free:
                    held[one] = self._uses.get(one, 0)
                    if len(held) == count:
                        break
            self._free.difference_update(held)
            more = bool(self._free) or self._held > 0
            self._held += len(held)
        return held, more

    def settle(self, held: dict[int, int], chosen: int | None, serial: int) -> None:
        """Give back all contexts but the chosen one."""
        with self._guard:
            self._held -= len(held)
            self._free.update(held)
            if chosen is not None:
                self._free.remove(chosen)
                self._uses[chosen] = serial

    def give_back(self, context: int) -> None:
        """A communicator was freed."""
        if context > SELF_CONTEXT:
            with self._guard:
                self._free.add(context)

    def unused(self) -> bool:
        """Whether no communicator is left but those of the world's beginning."""
        with self._guard:
            return len(self._free) + SELF_CONTEXT + 1 == _CONTEXTS


def agree(exchange: Callable[[Any], Schedule], contexts: Contexts, key: int, payload: Any = None) -> Schedule:
    """Agree on a context. Returns (what each rank has given, context, which use of it this is).

    exchange: a schedule that returns the objects of all ranks.  key: the same on all of them, and another one
    for each agreement that may be under way.

    Raises:
        Exception: no context is free on all ranks.
    """
    for attempt in range(_ATTEMPTS):
        first = (key + attempt) * _SPREAD % _CONTEXTS
        held, more = contexts.hold(first, _FIRST_OFFER * _GROWTH**attempt)
        told = yield from exchange((payload, held, more))
        offers = [offer for _, offer, _ in told]  # each from `first` on: the nearest one that all have
        chosen = next((one for one in offers[0] if all(one in offer for offer in offers)), None)
        serial = 0 if chosen is None else 1 + max(offer[chosen] for offer in offers)
        contexts.settle(held, chosen, serial)
        if chosen is not None:
            return [one for one, _, _ in told], chosen, serial
        if not any(another for _, _, another in told):
            break
    raise Exception(constants.ERR_NO_MEM, f"{_CONTEXTS} communicators are in use; free some")
