"""`Queue`: one rank puts messages, others read them in place. `queue_opening.py` makes it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from unisono import _native
from unisono._native import FaultKind
from unisono.engine import encoding
from unisono.engine.encoding.nodes import LARGE_NBYTES
from unisono.engine.windows.queue_links import (
    CLOSED,
    CUT,
    LOOK_S,
    QueueLink,
    QueueMemory,
    QueueRelay,
    TakenMessage,
    Told,
)
from unisono.engine.windows.window import Seconds, WindowOwner
from unisono.errors import GroupClosed, PeerLost, Timeout

LOCATE_AFTER_S = 0.5
"""A `put` that has waited longer asks the reader at which line it is, which interrupts it for a moment."""

LINGER_S = 2.0
"""How long the end of a group waits until other hosts have got all messages."""

_BRIEF = 1 << 16  # bytes that are copied with the GIL


class Terms(NamedTuple):
    """The arguments of a queue that are equal on all ranks."""

    writer: int
    readers: tuple[int, ...]
    nbytes: int
    keep: str
    pickle: bool


class Queue:
    """A queue of one writer and many readers. Made by `Group.queue`, which describes it.

    Any thread of the writer may put, and any of a reader get: each message goes to one thread of each reader.
    `timeout` is in seconds: 0 does not wait, `math.inf` waits for ever, None is the group's.

    Attributes:
        writer: the rank that puts.  readers: the ranks that may read.  keep: "all" or "latest".
    Raises:
        ValueError, TypeError: a wrong argument, or a message larger than the queue; nothing was put.
        Timeout, PeerLost: see the calls; the group and the queue go on.
        GroupClosed: the queue was closed.  Other kinds of GroupError: the group has failed.
    Example: with group.queue(readers=[1, 2]) as queue:
            queue.put({"step": 1, "x": np.ones(10**6)}) if group.rank == 0 else queue.get()
    """

    def __init__(
        self,
        owner: WindowOwner,
        ring: QueueMemory | None,
        terms: Terms,
        links: Sequence[QueueLink],
        relay: QueueRelay | None,
    ) -> None:
        """ring: None on a rank that neither writes nor reads.  links, relay: its threads between hosts."""
        self.writer, self.readers, _, self.keep, self._pickle = terms
        self._owner, self._ring, self._links, self._relay = owner, ring, links, relay
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        owner.leave_callbacks.append(self._end)

    def put(self, obj: Any, *, timeout: Seconds = None) -> None:
        """Write a message for all readers; wait until there is room. Its arrays are copied once.

        Args:
            obj: what `send_object` takes: arrays, and Python objects of plain types.
        Raises:
            Timeout: it names the reader that has not given back the oldest message, since when, and its line.
            PeerLost: a reader has died since the last call. This message was not put, and that reader is not
                waited for any more: call `put` again to go on without it.
        """
        ring, limit_s = self._place("put", writes=True), self._limit(timeout)
        pieces = self._encoded(obj)
        nbytes = sum(map(len, pieces))
        if nbytes > ring.native.capacity:
            text = f"put: the message has {nbytes} bytes, the queue {ring.native.capacity} in all"
            raise ValueError(f"{text}. Open it with more bytes=, or put smaller messages")
        with self._turn("put", limit_s) as left_s:
            for link in self._links:
                if (told := link.told(True)) is not None:
                    self._lose("put", told)
            fault, offset, *details = ring.native.reserve(nbytes, left_s)
            if fault:
                self._fail("put", fault, limit_s, offset, *details)
            for piece in pieces:
                end = offset + len(piece)
                if len(piece) < _BRIEF:
                    ring.bytes[offset:end] = piece
                else:
                    np.copyto(ring.array[offset:end], np.frombuffer(piece, np.uint8))
                offset = end
            ring.native.publish()

    def _encoded(self, obj: Any) -> list[Any]:
        plain = None if self._pickle else _native.encode_plain(obj)
        if plain is not None:
            return [plain]
        try:
            return list(encoding.encode_in_pieces(obj, pickle=self._pickle))
        except (TypeError, ValueError) as error:
            raise type(error)(f"put: {error}") from None

    def get(self, *, timeout: Seconds = None, copy: bool = False) -> Any:
        """The next message; with keep="latest" the newest one, if this rank has not had it yet.

        Its arrays of 4 KiB and more are read-only views of shared memory, which stay as they are while they
        live, or views of them; then the writer may use their room again. Everything else is a copy.

        Args:
            copy: its arrays are this rank's own, and writable.
        Raises:
            Timeout: there was none.  GroupClosed: there will be none: the writer has closed the queue.
            PeerLost: the writer has died; all that it had put has been read.
        """
        data = self.read(timeout=timeout)
        data = bytearray(data) if copy else data
        plain = _native.decode_plain(data)
        return encoding.decode(data, pickle=self._pickle, in_place=True) if plain is NotImplemented else plain

    def read(self, *, timeout: Seconds = None) -> Any:
        """The encoded bytes of the next message, as `get`: a read-only array in place, or if few, a copy."""
        ring, limit_s = self._place("get", writes=False), self._limit(timeout)
        with self._turn("get", limit_s) as left_s:
            if not ring.native.reads(ring.place) and not self._closed:
                raise ValueError(f"get: rank {self._owner.rank} has left this queue; call join() before")
            fault, number, offset, nbytes = ring.native.take(ring.place, left_s)
            if fault:
                self._fail("get", fault, limit_s, number, offset, nbytes)
        if not number:
            self._fail("get", FaultKind.PEER_LEFT, limit_s)
        if nbytes >= LARGE_NBYTES:
            return np.asarray(TakenMessage(ring, number, offset, nbytes))
        data = bytes(ring.bytes[offset : offset + nbytes])
        ring.native.give_back(ring.place, number)
        return data

    def __iter__(self) -> Iterator[Any]:
        """The messages until the writer closes the queue; each is awaited for the group's timeout."""
        with contextlib.suppress(GroupClosed):
            while True:
                yield self.get()

    def join(self) -> None:
        """Read again after `leave`, or begin, after `Group.queue(..., join=False)`.

        This rank gets every message whose `put` begins after this call, on another host also those on
        their way; with keep="latest" the newest one at once.
        """
        ring = self._place("join", writes=False)
        with self._lock:
            ring.native.join(ring.place)

    def leave(self) -> None:
        """Read no more; the writer does not wait for this rank. Arrays of messages stay as they are."""
        ring = self._place("leave", writes=False)
        ring.native.stop(ring.place)  # ends a `get` of another thread, which has the lock
        with self._lock:
            ring.native.leave(ring.place)

    def slowest(self, *, locate: bool = False) -> str:
        """Which reader has not given back the oldest message, since when; "" if none. The writer calls it.

        Args:
            locate: also at which line it is. That takes up to 0.2 s, and interrupts it for a moment.
        """
        ring = self._place("slowest", writes=True)
        found = ring.slowest(locate)
        links = (one for one in self._links if found and ring.ranks[one.place] == found.rank)
        told = next((link.told(False) for link in links), None) or found
        return told.text if told else ""

    def _limit(self, timeout: Seconds) -> float:
        return 0.0 if timeout == 0 else self._owner.seconds(timeout)

    @contextlib.contextmanager
    def _turn(self, operation: str, limit_s: float) -> Iterator[float]:
        """One thread at a time; gives the seconds that are left."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
            raise Timeout(f"queue.{operation} timed out after {limit_s:g} s: another thread has its turn")
        try:
            yield max(0.0, limit_s - (time.monotonic() - began))
        finally:
            self._lock.release()

    def _place(self, operation: str, *, writes: bool) -> QueueMemory:
        """This rank's place in the queue, if it may call that."""
        rank, ring = self._owner.rank, self._ring
        if ring is None or writes != (rank == self.writer):
            does = "writes" if rank == self.writer else "reads" if ring else "neither writes nor reads"
            who = f"rank {self.writer} writes it, {list(self.readers)} read it"
            raise ValueError(f"{operation}: rank {rank} {does} this queue; {who}")
        if self._closed:
            raise GroupClosed(f"queue.{operation} failed: this rank has closed the queue or its group")
        ring.engine.check_process()  # before a lock that another thread may have held at a fork
        return ring

    def _fail(self, operation: str, fault: int, limit_s: float, *details: int) -> NoReturn:
        """Raise the error of a call. details: the rank that is lost, its signal, its exit code."""
        ring, what = self._ring, f"queue.{operation} failed"
        assert ring is not None
        if self._closed:
            raise GroupClosed(f"{what}: this rank has closed the queue or its group")
        if fault == FaultKind.TIMEOUT:
            who = ring.told(self.writer, "has put nothing new").text
            if operation == "put":
                who = self.slowest(locate=limit_s >= LOCATE_AFTER_S)
            raise Timeout(f"queue.{operation} timed out after {limit_s:g} s: {who}")
        if fault == FaultKind.PEER_LOST:
            self._lose(operation, ring.lost(*details), *details[1:])
        if fault != FaultKind.PEER_LEFT:
            raise self._owner.failure(f"queue.{operation}", limit_s)
        if ring.native.state == CUT:
            self._lose(operation, ring.told(self.writer, "is lost"))
        closed = ring.native.state == CLOSED
        who = f"rank {self.writer}, the writer, has closed" if closed else "this rank has left"
        raise GroupClosed(f"{what}: {who} the queue")

    def _lose(self, operation: str, told: Told, signal: int = 0, code: int = -1) -> NoReturn:
        role = "which reads this queue: it is not waited for any more, call put again to go on without it"
        if operation != "put":
            role = "which writes this queue" if told.rank == self.writer else "which passes it on to its host"
        raise PeerLost(
            f"queue.{operation} failed: {told.text}, {role}",
            rank=told.rank,
            pid=told.pid,
            signal=signal or None,
            exit_code=code if code >= 0 else None,
        )

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the queue or its group."""
        return self._closed

    def close(self, *, timeout: Seconds = None) -> None:
        """End the queue here. Readers still get all messages that the writer has put, and then GroupClosed.

        The writer waits until other hosts have got them; so does the first reader of such a host, which
        passes them on, while others there read. The ranks need not call it together.
        """
        limit_s = self._limit(timeout)
        end = time.monotonic() + limit_s
        while self._relay and not self._closed and self._relay.needed and time.monotonic() < end:
            self._relay.thread.join(LOOK_S)
        self._end(limit_s)
        if any(link.thread.is_alive() for link in self._links):
            told = next(filter(None, (link.told(False) for link in self._links)), None)
            who = told.text if told else "another host has not got all messages"
            raise Timeout(f"queue.close timed out after {limit_s:g} s: {who}")

    def _end(self, limit_s: float = LINGER_S) -> None:
        """The end of its group calls this, too."""
        if self._closed or self._ring is None:
            return
        self._closed = True
        if os.getpid() != self._pid:  # a forked child's copy: its parent goes on
            return
        native, place = self._ring.native, self._ring.place
        native.stop(place)  # ends a call of another thread, which has the lock
        with self._lock:
            native.leave(place) if place >= 0 else native.end(CLOSED)
        end = time.monotonic() + limit_s
        for link in self._links:
            link.thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
        with contextlib.suppress(ValueError):  # the group ends
            self._owner.leave_callbacks.remove(self._end)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self._end()
