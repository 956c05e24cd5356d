"""Failures while a group is made: the first one is reported to all ranks.

It is in the group's store, under "failed". Only a rank that waits reads it, so a fast rendezvous takes no
extra time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NoReturn

from unisono.engine.base.limits import limit_text
from unisono.engine.store import Store
from unisono.errors import GroupError, RendezvousError, StoreError, StoreTimeout

__all__ = [
    "await_key",
    "fail",
    "first_failure",
    "patience_s",
    "raise_if_failed",
    "reported_failures",
    "seconds_left",
]

FAILED = "failed"
POLL_S = 0.2
ASK_S = 2.0  # longest pause between two reads of the key: shorter than the store exists after a failure
TELL_S = 2.0
GRACE_S = 1.0  # further wait for another rank's result: that rank knows the cause better


def patience_s(size: int) -> float:
    """Seconds between two reads of the failure key; with many ranks each reads it less often."""
    return min(POLL_S * max(1, size // 8), ASK_S)


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline, at least 1 ms: a key that is already set is still read."""
    return max(deadline - time.monotonic(), 0.001)


def await_key(store: Store, key: str, size: int, deadline: float) -> bytes:
    """The value of a key, unless one of the `size` ranks fails first.

    Raises:
        RendezvousError: a rank failed.  StoreTimeout: the deadline has passed.
    """
    while True:
        try:
            return store.get(key, min(patience_s(size), seconds_left(deadline)))
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
    """The first failure, which may be reported within `within_s`; "": none."""
    try:
        return store.get(FAILED, within_s).decode()
    except StoreError:  # also if the rank that serves the store has ended
        return ""


def fail(store: Store, text: str) -> NoReturn:
    """Report a failure to all ranks, and raise the first one reported."""
    raise RendezvousError(store.compare_set(FAILED, b"", text).decode())


@contextlib.contextmanager
def reported_failures(store: Store, rank: int) -> Iterator[None]:
    """Report an exception of this block, so that the other ranks stop waiting."""
    try:
        yield
    except BaseException as error:
        gone = isinstance(error, StoreError) and not isinstance(error, StoreTimeout)
        if not gone:  # otherwise another world's store may be at its address now
            with contextlib.suppress(StoreError):  # the first error is the one to raise
                store.compare_set(FAILED, b"", _text(error, rank), timeout_s=TELL_S)
        raise


def _text(error: BaseException, rank: int) -> str:
    """The text for the other ranks. Some kinds of errors already name a rank."""
    if isinstance(error, (RendezvousError, GroupError)):
        return str(error)
    why = limit_text(error)
    return f"rank {rank} (host {os.uname().nodename}) failed while the group was being made: {why}"
