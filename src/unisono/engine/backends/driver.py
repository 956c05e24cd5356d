"""The interface of a library of collectives, so that a `Group` can run over it.

A call arrives here checked, as flat arrays of the library's own kind. A driver starts it and returns an
object to wait for. It checks no arguments, and raises no error of Unisono except `NotSupported`.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.engine.operations.reduction import BuiltinOp
from unisono.errors import NotSupported, message

SHORTEST_NAP_S = 20e-6
LONGEST_NAP_S = 1e-3
NATIVE = "The native backend can."
NO_DTYPE = "its messages do not carry their dtype, which a Status names"


class LibraryCall(NamedTuple):
    """A collective with its buffers.

    Attributes:
        kind: the collective whose plan the engine would run: "all_gather", also for all_gather_v.
        dtype: its name.  even: all blocks have one size, on every rank.
        out: the output, or the buffer used in place; sendbuf: the input. Each is one flat array, or one for
            each rank; empty where this rank has none.
    """

    kind: str
    dtype: str
    op: BuiltinOp
    root: int
    even: bool
    out: list[Any]
    sendbuf: list[Any]


class LibraryRequest(ABC):
    """An operation of the library that was started."""

    source = -1
    """The rank a received message came from, once done."""
    tag = -1
    nbytes = 0

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended. Its buffers may need `finish` afterwards, which the group calls once."""

    @abstractmethod
    def block(self) -> None:
        """Wait for its end, by the library's own wait."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for its end; False after `timeout_s` seconds. None: as long as the library waits."""
        if timeout_s is None:
            self.block()
            return True
        end, nap_s = time.monotonic() + timeout_s, SHORTEST_NAP_S
        while not self.done():
            if time.monotonic() >= end:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        return True

    def finish(self) -> None:  # noqa: B027
        """Complete the results; called when it is done."""

    def cancel(self) -> bool:
        """Cancel a receive; returns whether that was possible."""
        return False


class CompletedRequest(LibraryRequest):
    """An operation that had ended before it was returned."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        if finish is not None:
            finish()

    def done(self) -> bool:
        """True."""
        return True

    def block(self) -> None:
        """Return at once."""


class LibraryDriver(ABC):
    """One rank of one group of a library.

    A driver has one method for each collective of `unisono.plans.CONTRACTS`, which `start` calls by the name
    in `LibraryCall.kind`: `_all_reduce`, `_all_gather`, ... Each takes the `LibraryCall` (MPI's also `later`)
    and returns a `LibraryRequest`.

    Attributes:
        name: of the backend.  device: whose memory it moves, "cpu" or "cuda".
        rank, size: of the group.  issued: how many collectives were started.
        failures: the exceptions that the library raises when an operation fails.
        deadlines: an operation can have a timeout; otherwise it waits for ever.
        any_source, any_tag: a receive may leave out its source, its tag.  most_tag: the largest tag.
        to_itself: a rank may send to itself.
        short_messages: a message may be shorter than its receiver's buffer.
        matched_probe: a receive can learn the size of its message first, see `receive_object`.
    """

    name: str
    device = "cpu"
    deadlines = False
    any_source = any_tag = to_itself = True
    short_messages = True
    matched_probe = False
    most_tag = (1 << 31) - 1
    failures: tuple[type[Exception], ...]
    rank: int
    size: int
    issued = 0

    @abstractmethod
    def flat(self, address: int, numel: int, dtype: str) -> Any:
        """CPU memory as a flat array of the library's kind."""

    @abstractmethod
    def start(self, call: LibraryCall, later: bool) -> LibraryRequest:
        """Start a collective, by the method `_<kind>` of this driver.

        later: asynchronously; otherwise it may complete before the return.
        """

    @abstractmethod
    def send(self, x: Any, dst: int, tag: int, is_object: bool) -> LibraryRequest:
        """Start to send a flat array."""

    @abstractmethod
    def receive(self, x: Any, src: int, tag: int, is_object: bool) -> LibraryRequest:
        """Start to receive into a flat array. src, tag: -1 for any."""

    def receive_object(self, src: int, tag: int) -> tuple[Any, int, int]:
        """Receive an object of any size, sent as one message; wait for it.

        Returns:
            An array of its bytes, its source and its tag.
        """
        raise NotImplementedError

    @abstractmethod
    def subgroup(self, ranks: tuple[int, ...], number: int) -> LibraryDriver | None:
        """The driver of a group of these ranks, None where this rank is not in it. All ranks call it.

        number: of the subgroup; the same on all ranks, and never twice.
        """

    @abstractmethod
    def copy(self, x: Any) -> Any:
        """A copy of a flat array."""

    def stage(self, array: Any) -> Any:
        """A copy of a NumPy array in the memory that the backend moves."""
        raise NotImplementedError

    def is_mismatch(self, failure: Exception) -> bool:  # noqa: ARG002
        """Whether this error of the library means that the sizes of ranks differ."""
        return False

    def is_timeout(self, failure: Exception) -> bool:  # noqa: ARG002
        """Whether this error of the library is a timeout."""
        return False

    def leave(self) -> None:  # noqa: B027  (some have nothing to do)
        """Close the group on this rank."""

    def abandon(self) -> None:
        """In a forked child: never end the group there, which may wait for threads that it does not have."""
        keep_for_ever(self)


def keep_for_ever(*what: Any) -> None:
    """Free none of it before the process ends: a library goes on using it, and cannot be stopped."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def unsupported(driver: LibraryDriver, what: str, why: str, remedy: str = "") -> NotSupported:
    """The error for a feature that a backend does not have.

    Example: "backend 'mpi' does not support timeout=: no operation of the library takes a deadline. ..."
    """
    text = f"backend {driver.name!r} does not support {what}"
    remedy = remedy or f"Leave it out. {NATIVE}"
    return NotSupported(message(text, observed=why, remedy=remedy), backend=driver.name, what=what)
