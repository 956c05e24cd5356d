"""Failures while a group is made: the first one is told to all, and whoever waits for the others hears of it.

It stands in the group's store, under "failed". Nobody asks for it who does not wait: ranks that come together
quickly pay nothing for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NoReturn

from unisono.errors import GroupError, RendezvousError, StoreError, StoreTimeout
from unisono.limits import described
from unisono.store import Store

__all__ = ["await_key", "fail", "first_failure", "left", "patience_s", "raise_if_failed", "told"]

FAILED = "failed"
POLL_S = 0.2
ASK_S = 2.0  # at most, between two looks at who failed: less than the store outlives a failure
TELL_S = 2.0
GRACE_S = 1.0  # by which who waits for another's word outlasts it: that one knows better what went wrong


def patience_s(size: int) -> float:
    """Seconds between two looks at who failed: to ask the store is dear to all, so of many ranks each asks
    less often.
    """
    return min(POLL_S * max(1, size // 8), ASK_S)


def left(deadline: float) -> float:
    """Seconds that may still be waited: a few more than none, for what is there already."""
    return max(deadline - time.monotonic(), 0.001)


def await_key(store: Store, key: str, size: int, deadline: float) -> bytes:
    """The value of a key, unless one of the `size` ranks fails first.

    Raises:
        RendezvousError: one did.  StoreTimeout: the deadline came first.
    """
    while True:
        try:
            return store.get(key, min(patience_s(size), left(deadline)))
        except StoreTimeout:
            raise_if_failed(store)
            if time.monotonic() >= deadline:
                raise


def raise_if_failed(store: Store) -> None:
    """Raise RendezvousError with the first failure, if there is one."""
    failed = store.peek(FAILED)
    if failed is not None:
        raise RendezvousError(failed.decode())


def first_failure(store: Store, within_s: float) -> str:
    """What the first one that failed says, who may be just about to; "": nothing."""
    try:
        return store.get(FAILED, within_s).decode()
    except StoreError:  # also where the store went with the rank that serves it
        return ""


def fail(store: Store, text: str) -> NoReturn:
    """Tell everybody, and raise what the first one said."""
    raise RendezvousError(store.compare_set(FAILED, b"", text).decode())


@contextlib.contextmanager
def told(store: Store, rank: int) -> Iterator[None]:
    """Whatever is raised here ends the others' waiting, too."""
    try:
        yield
    except BaseException as error:
        gone = isinstance(error, StoreError) and not isinstance(error, StoreTimeout)
        if not gone:  # what is at its address by now may be another world's store
            with contextlib.suppress(StoreError):  # the first error is the one to tell
                store.compare_set(FAILED, b"", _words(error, rank), timeout_s=TELL_S)
        raise


def _words(error: BaseException, rank: int) -> str:
    """What the others are told. Errors of these kinds speak of ranks already."""
    if isinstance(error, (RendezvousError, GroupError)):
        return str(error)
    why = described(error)
    return f"rank {rank} (host {os.uname().nodename}) failed while the group was being made: {why}"
