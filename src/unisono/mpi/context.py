"""The contexts of communicators: numbers that keep their messages apart, on which their ranks agree.

Several agreements may be under way on a rank: of several threads, or of requests. Each of them holds the
contexts that it offers, so what it takes is not another's. Agreements of other communicators offer others
first, and meet only when few are left.
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
        self._free = dict.fromkeys(range(last + 1, _CONTEXTS))
        self._uses: dict[int, int] = {}
        self._held = 0

    def hold(self, first: int, count: int) -> tuple[dict[int, int], bool]:
        """(contexts and how often each was used, whether there may be more): held until `settle`."""
        with self._guard:
            order = itertools.chain(range(first, _CONTEXTS), range(first))
            held = list(itertools.islice((one for one in order if one in self._free), count))
            for one in held:
                del self._free[one]
            more = bool(self._free) or self._held > 0
            self._held += len(held)
            return {one: self._uses.get(one, 0) for one in held}, more

    def settle(self, held: dict[int, int], chosen: int | None, serial: int) -> None:
        """Give back all contexts but the chosen one."""
        with self._guard:
            self._held -= len(held)
            self._free.update(dict.fromkeys(one for one in held if one != chosen))
            if chosen is not None:
                self._uses[chosen] = serial

    def give_back(self, context: int) -> None:
        """A communicator was freed."""
        if context > SELF_CONTEXT:
            with self._guard:
                self._free[context] = None

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
        common = [one for one in told[0][1] if all(one in offer for _, offer, _ in told)]
        chosen = min(common, default=None, key=lambda one: (one - first) % _CONTEXTS)
        serial = max((offer[chosen] for _, offer, _ in told), default=0) + 1 if common else 0
        contexts.settle(held, chosen, serial)
        if chosen is not None:
            return [one for one, _, _ in told], chosen, serial
        if not any(another for _, _, another in told):
            break
    raise Exception(constants.ERR_NO_MEM, f"{_CONTEXTS} communicators are in use; free some")
