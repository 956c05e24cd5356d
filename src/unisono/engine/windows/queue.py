"""`Queue`: one rank puts messages, others read them in place. `queue_opening.py` makes it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from unisono import _native, errors
from unisono._native import FaultKind
from unisono.engine import encoding
from unisono.engine.encoding.nodes import LARGE_NBYTES
from unisono.engine.windows.queue_links import Link, QueueState, Relay, Ring, Told
from unisono.engine.windows.window import Seconds, WindowOwner

LOCATE_AFTER_S = 0.5
"""A wait that took longer asks the reader at which line it is, which may take 0.2 s and interrupts it."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
LINGER_S = 2.0
"""How long the end of a group waits until other hosts have got all messages."""

LOOK_S = 0.02
"""How often a rank that passes messages on looks whether others still read them, when it closes the queue."""

_BRIEF = 1 << 16  # bytes that are copied with the GIL


def fill(room: Bytes, pieces: Sequence[Any]) -> None:
    """Copy pieces into `room`, one behind another; large ones without the GIL."""
    offset = 0
    for piece in pieces:
        end = offset + len(piece)
        if len(piece) < _BRIEF:
            room.data[offset:end] = piece
        else:
            np.copyto(room[offset:end], np.frombuffer(piece, np.uint8))
        offset = end


class Queue:
    """A queue of one writer and many readers. Made by `Group.queue`, which describes it.

    Every thread of the writer may put, and every thread of a reader get: each message goes to one of them.

    Attributes:
        writer: the rank that puts.  readers: the ranks that may read.  keep: "all" or "latest".
        nbytes: the room for messages, and the size of the largest one.
    Raises:
        ValueError, TypeError: a wrong argument, or a message that is too large; nothing was put.
        Timeout, PeerLost: see the calls. The group goes on, unlike after other errors of a `GroupError`.
        GroupClosed: the queue was closed.  GroupError: the group has failed, and its queues with it.
    Example: with group.queue(readers=[1, 2]) as queue:
            queue.put({"step": 1, "x": np.ones(10**6)}) if group.rank == 0 else queue.get()
    """

    def __init__(
        self,
        owner: WindowOwner,
        ring: Ring | None,
        writer: int,
        readers: Sequence[int],
        keep: str,
        pickle: bool,
        links: Sequence[Link] = (),
        relay: Relay | None = None,
    ) -> None:
        """ring: None on a rank that neither writes nor reads.  links, relay: its threads between hosts."""
        self.writer, self.readers, self.keep = writer, tuple(readers), keep
        self._owner, self._ring, self._pickle = owner, ring, pickle
        self._links, self._relay = links, relay
        self._lock = threading.Lock()
        self._closed = False
        owner.leave_callbacks.append(self._end)

    @property
    def nbytes(self) -> int:
        """The room for messages, in bytes."""
        return 0 if self._ring is None else self._ring.native.capacity

    # ---- the writer ------------------------------------------------------------------------------------

    def put(self, obj: Any, *, timeout: Seconds = None) -> None:
        """Write a message for all readers; wait until there is room. Its arrays are copied once.

        Args:
            obj: what `send_object` takes: arrays, and Python objects of plain types.
        Raises:
            Timeout: it names the reader that has not given back the oldest message, since when, and its line.
            PeerLost: a reader has died since the last call. This message was not put, and that reader is not
                waited for any more: call `put` again to go on without it.
        """
        pieces = self.encode(obj)
        self.write(sum(map(len, pieces)), lambda room: fill(room, pieces), timeout=timeout)

    def encode(self, obj: Any) -> list[Any]:
        """The bytes of a message in pieces; large arrays are among them as they are."""
        plain = None if self._pickle else _native.encode_plain(obj)
        if plain is not None:
            return [plain]
        try:
            return list(encoding.encode_in_pieces(obj, pickle=self._pickle))
        except (TypeError, ValueError) as error:
            raise type(error)(f"put: {error}") from None

    def write(self, nbytes: int, fill: Callable[[Bytes], None], *, timeout: Seconds = None) -> None:
        """Put a message of raw bytes, for `read`: `fill` writes them in place. Errors: as `put`."""
        ring, limit_s = self._place("put"), self._owner.seconds(timeout)
        if self._owner.rank != self.writer:
            raise ValueError(f"put: rank {self._owner.rank} reads this queue; rank {self.writer} writes it")
        if nbytes > ring.native.capacity:
            text = f"put: the message has {nbytes} bytes, the queue {ring.native.capacity} in all"
            raise ValueError(f"{text}. Open it with more bytes=, or put smaller messages")
        with self._turn("put", limit_s) as left_s:
            for link in self._links:
                if (told := link.told(True)) is not None:
                    self._lose("put", told)
            fault, offset, *details = ring.native.reserve(nbytes, left_s)
            if fault:
                self._fail("put", fault, limit_s, [offset, *details])
            fill(ring.array[offset : offset + nbytes])
            ring.native.publish()

    # ---- readers ---------------------------------------------------------------------------------------

    def get(self, *, timeout: Seconds = None) -> Any:
        """The next message; with keep="latest" the newest one, if this rank has not had it yet.

        Arrays of 4 KiB and more are read-only views of shared memory. They stay as they are as long as they
        live; then the writer may use their room again. Everything else is a copy.

        Raises:
            Timeout: there was none.  GroupClosed: there will be none: the writer has closed the queue.
            PeerLost: the writer has died; all of its messages have been read.
        """
        return self.decode(self.read(timeout=timeout))

    def decode(self, data: Any) -> Any:
        """The message of these bytes; its arrays are views of them."""
        plain = _native.decode_plain(data)
        return encoding.decode(data, pickle=self._pickle, in_place=True) if plain is NotImplemented else plain

    def __iter__(self) -> Iterator[Any]:
        """The messages until the writer closes the queue; each is awaited for the group's timeout."""
        while True:
            try:
                yield self.get()
            except errors.GroupClosed:
                return

    def read(self, *, timeout: Seconds = None) -> Any:
        """The bytes of the next message: a copy, from 4 KiB on a read-only array in place. Errors: as `get`."""
        operation = "get"
        ring, limit_s = self._own_place(operation), self._owner.seconds(timeout)
        with self._turn(operation, limit_s) as left_s:
            if not ring.native.reads(ring.place) and not self._closed:
                raise ValueError(
                    f"{operation}: rank {self._owner.rank} has left this queue; call join() before"
                )
            fault, number, *place = ring.native.take(ring.place, left_s)
            if fault:
                self._fail(operation, fault, limit_s, [number, *place])
        if not number:
            self._over(operation)
        offset, nbytes = place
        if nbytes >= LARGE_NBYTES:
            return ring.view(number, offset, nbytes)
        data = bytes(ring.bytes[offset : offset + nbytes])
        ring.native.give_back(ring.place, number)
        return data

    def _over(self, operation: str) -> NoReturn:
        ring = self._own_place(operation)
        if ring.native.state == QueueState.CUT:
            text = f"queue.{operation} failed: rank {self.writer}, which writes this queue, is lost"
            raise errors.PeerLost(text, rank=self.writer, pid=self._pid(self.writer))
        if ring.native.state == QueueState.CLOSED:
            raise errors.GroupClosed(f"queue.{operation}: rank {self.writer}, the writer, has closed the queue")
        raise errors.GroupClosed(f"queue.{operation}: this rank has left the queue")

    def join(self) -> None:
        """Read again after `leave`, or begin, after `Group.queue(..., join=False)`.

        This rank gets every message whose `put` begins after this call has returned; with keep="latest" the
        newest one at once.
        """
        with self._lock:
            self._own_place("join").native.join(self._own_place("join").place)

    def leave(self) -> None:
        """Read no more; the writer does not wait for this rank. Arrays of messages stay as they are."""
        ring = self._own_place("leave")
        ring.native.stop(ring.place)  # ends a `get` of another thread, which has the lock
        with self._lock:
            ring.native.leave(ring.place)

    # ---- both ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, operation: str, limit_s: float) -> Iterator[float]:
        """One thread at a time; gives the seconds that are left."""
        if self._lock.acquire(blocking=False):
            left_s = limit_s
        else:
            end = time.monotonic() + limit_s
            if not self._lock.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
                raise errors.Timeout(f"queue.{operation} timed out after {limit_s:g} s: another thread waits")
            left_s = max(0.0, end - time.monotonic())
        try:
            yield left_s
        finally:
            self._lock.release()

    def _place(self, operation: str) -> Ring:
        if self._ring is None:
            who = f"rank {self._owner.rank} neither writes nor reads this queue"
            raise ValueError(f"{operation}: {who}: rank {self.writer} writes, {list(self.readers)} read")
        if self._closed:
            raise errors.GroupClosed(f"queue.{operation} failed: this rank has closed the queue or its group")
        return self._ring

    def _own_place(self, operation: str) -> Ring:
        ring = self._place(operation)
        if ring.place < 0:
            raise ValueError(f"{operation}: rank {self._owner.rank} writes this queue")
        return ring

    def _fail(self, operation: str, fault: int, limit_s: float, details: Sequence[int]) -> NoReturn:
        if self._closed:
            raise errors.GroupClosed(f"queue.{operation} failed: this rank has closed the queue or its group")
        if self._owner.engine.faulted:
            raise self._owner.failure(f"queue.{operation}", limit_s)
        if fault == FaultKind.TIMEOUT:
            who = f"rank {self.writer} (pid {self._pid(self.writer)}) has put nothing new"
            if operation == "put":
                who = self._slowest(limit_s >= LOCATE_AFTER_S) or "another thread has its turn"
            raise errors.Timeout(f"queue.{operation} timed out after {limit_s:g} s: {who}")
        self._lose(operation, self._place(operation).lost(*details), *details[1:])

    def _lose(self, operation: str, told: Told, signal: int = 0, code: int = -1) -> NoReturn:
        role = "which reads this queue: it is not waited for any more, call put again to go on without it"
        if operation != "put":
            role = "which writes this queue" if told.rank == self.writer else "which passes it on to its host"
        raise errors.PeerLost(
            f"queue.{operation} failed: {told.text}, {role}",
            rank=told.rank,
            pid=told.pid,
            signal=signal or None,
            exit_code=code if code >= 0 else None,
        )

    def slowest(self, *, locate: bool = False) -> str:
        """Which reader has not given back the oldest message, since when; "" if there is none.

        Args:
            locate: also at which line it is. That takes up to 0.2 s, and sends its thread SIGURG.
        """
        return self._slowest(locate)

    def _slowest(self, locate: bool) -> str:
        ring = self._place("slowest")
        found = ring.slowest(locate)
        link = next((one for one in self._links if found and ring.ranks[one.place] == found.rank), None)
        told = (link and link.told(False)) or found
        return told.text if told else ""

    def _pid(self, rank: int) -> int:
        return self._owner.engine.record_of(rank).pid

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the queue or its group."""
        return self._closed

    def close(self, *, timeout: Seconds = None) -> None:
        """End the queue here. Readers still get all messages that the writer has put, and then GroupClosed.

        The writer waits until other hosts have got them; so does the first reader of such a host, which passes
        them on, while others there read. The ranks need not call it together.
        """
        limit_s = self._owner.seconds(timeout)
        end = time.monotonic() + limit_s
        while self._relay and not self._closed and self._relay.needed and time.monotonic() < end:
            self._relay.thread.join(LOOK_S)
        self._end(limit_s)
        if any(link.thread.is_alive() for link in self._links):
            told = next(filter(None, (link.told(False) for link in self._links)), None)
            who = told.text if told else "another host has not got all messages"
            raise errors.Timeout(f"queue.close timed out after {limit_s:g} s: {who}")

    def _end(self, limit_s: float = LINGER_S) -> None:
        """The end of its group calls this, too."""
        if self._closed or self._ring is None:
            return
        self._closed = True
        native, place = self._ring.native, self._ring.place
        native.stop(place)  # ends a call of another thread, which has the lock
        with self._lock:
            native.leave(place) if place >= 0 else native.end(QueueState.CLOSED)
        end = time.monotonic() + limit_s
        for link in self._links:
            link.thread.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(ValueError):  # the group ends
            self._owner.leave_callbacks.remove(self._end)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()
