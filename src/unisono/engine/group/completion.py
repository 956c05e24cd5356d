"""Waiting for several works at once, of any groups."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from math import inf

from unisono.engine.base.validation import instance, listed
from unisono.engine.group.work import Work, seconds
from unisono.errors import Timeout

__all__ = ["wait_all", "wait_any"]

SHORTEST_NAP_S = 20e-6
LONGEST_NAP_S = 1e-3


def wait_all(works: Iterable[Work], *, timeout: float | timedelta | None = None) -> None:
    """Wait until all of `works` have ended, and raise the first error.

    Args:
        works: of collectives and messages, of any groups.
        timeout: seconds for all of them together; None: each has its own.
    Raises:
        Timeout: one has not ended by then. They all continue; wait again.
        PeerLost, Mismatch, Aborted: the error of one of them.
    """
    ours = _checked("wait_all", works)
    end = None if timeout is None else time.monotonic() + seconds(timeout, inf)
    for work in ours:
        if end is None or work.done():
            work.wait()
        else:
            work.wait(max(end - time.monotonic(), SHORTEST_NAP_S))


def wait_any(works: Iterable[Work], *, timeout: float | timedelta | None = None) -> int:
    """Wait until one of `works` has ended; returns its index in the list, or raises its error.

    If several have ended, the first in the list counts. It polls at least every millisecond.

    Raises:
        ValueError: there are no works.
        Timeout: none has ended within `timeout` seconds. They all continue; wait again.
        PeerLost, Mismatch, Aborted: the error of that work.
    Example: first = un.wait_any([group.irecv(x, 1), group.irecv(y, 2)])
    """
    ours = _checked("wait_any", works)
    if not ours:
        raise ValueError("wait_any: there are no works to wait for")
    limit = seconds(timeout, inf)
    end = time.monotonic() + limit
    nap = SHORTEST_NAP_S
    while True:
        for place, work in enumerate(ours):
            if work.done():
                work.wait()
                return place
        if time.monotonic() >= end:
            raise Timeout(f"wait_any: none of {len(ours)} works is done after {limit:.3f} s; they go on")
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_S)


def _checked(name: str, works: Iterable[Work]) -> list[Work]:
    return [
        instance(work, Work, f"{name}: works[{place}]")
        for place, work in enumerate(listed(works, f"{name}: works"))
    ]
