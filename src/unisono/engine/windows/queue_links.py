"""A queue between hosts: the writer's host sends each message once to every other host.

On the writer's host a `QueueLink` reads the queue as a reader does, and sends what it takes. On another host
a `QueueRelay`, in one of its ranks, receives each message into a queue of that host. Both are threads that
sleep.

    writer -> link:   8 bytes length, the message; or END
    link <- relay:    4 bytes length, a `Told`: a reader that has died, or one that is slow
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unisono import _native
from unisono._native import FaultKind
from unisono.engine.diagnosis.fault_text import signal_name
from unisono.engine.membership.contact import process_state

TELL_AFTER_S = 0.5
"""A relay that waits so long for room tells the writer for which reader; then after twice as long."""

LONGEST_PATIENCE_S = 16.0
"""The longest of these waits."""

LOOK_S = 0.02
"""How often a relay looks whether the readers of its host live, and at the end whether they still read."""

_LENGTH, _TOLD = struct.Struct("<Q"), struct.Struct("<I")
_END = 2**64 - 1
OPEN, CLOSED, CUT = range(3)
"""As `_native.Queue.state`."""


class Told(msgspec.Struct, array_like=True):
    """What a relay tells the writer of a reader. lost: it has died; otherwise it is slow."""

    lost: bool
    rank: int
    pid: int
    text: str


_decode_told = msgspec.msgpack.Decoder(Told).decode


class QueueMemory(NamedTuple):
    """The queue of one host in this process.

    Attributes:
        array, bytes: the memory of messages.  ranks: of its places.  place: of this rank; -1: it writes.
    """

    engine: _native.Engine
    native: _native.Queue
    array: np.ndarray[Any, np.dtype[np.uint8]]
    bytes: memoryview
    ranks: tuple[int, ...]
    place: int

    def slowest(self, locate: bool) -> Told | None:
        """The reader that has not given back the oldest message. locate: ask for its line, see `Queue`."""
        place, number, since_s, taken = self.native.slowest()
        if place < 0:
            return None
        line = self.native.line_of(place) if locate else ""
        told = self.told(
            self.ranks[place],
            f"{'holds' if taken else 'has not taken'} message {number} for {since_s:.3g} s"
            + (line and f": it is at {line}"),
        )
        if process_state(told.pid) in "Tt":
            told.text += ": it is stopped (SIGSTOP, a debugger)"
        return told

    def lost(self, rank: int, signal: int = 0, code: int = -1) -> Told:
        """A rank that has died, and how."""
        how = f"ended with exit code {code}" if code >= 0 else "has died"
        return self.told(rank, f"was ended by {signal_name(signal)}" if signal else how, lost=True)

    def told(self, rank: int, what: str, *, lost: bool = False) -> Told:
        """What is said of a rank."""
        pid = self.engine.record_of(rank).pid
        return Told(lost, rank, pid, f"rank {rank} (pid {pid}) {what}")


class TakenMessage:
    """A message in place, read-only, for NumPy; it is given back when no array uses it any more."""

    __slots__ = ("__array_interface__", "_number", "_ring")

    def __init__(self, ring: QueueMemory, number: int, offset: int, nbytes: int) -> None:
        data = ring.array.__array_interface__["data"][0] + offset, True
        self.__array_interface__ = {"data": data, "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._ring, self._number = ring, number

    def __del__(self) -> None:
        self._ring.native.give_back(self._ring.place, self._number)


class _End:
    """One end of a connection, and its thread."""

    def __init__(self, ring: QueueMemory, sock: socket.socket) -> None:
        self._ring, self.socket = ring, sock
        self.thread = threading.Thread(target=self._run_and_close, name="unisono queue", daemon=True)
        self.thread.start()

    def _run_and_close(self) -> None:
        with self.socket:
            self._run()

    def _run(self) -> None:
        raise NotImplementedError


class QueueLink(_End):
    """Sends what is put to one other host, in a thread. `place` is that of the host's relay."""

    def __init__(self, ring: QueueMemory, place: int, sock: socket.socket) -> None:
        ring.native.join(place)
        self.place, self._received = place, b""
        self._told_lock = threading.Lock()
        self._dead: list[Told] = []
        self._slow: Told | None = None
        super().__init__(ring, sock)

    def told(self, lost: bool) -> Told | None:
        """What the relay has told since: of a reader that has died, or of the slowest one. Any thread."""
        with self._told_lock:
            return self._told(lost)

    def _told(self, lost: bool) -> Told | None:
        try:
            while more := self.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received += more
            self._cut()
        except OSError:  # nothing more has come, or the connection has ended
            pass
        while len(self._received) >= _TOLD.size:
            end = _TOLD.size + _TOLD.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            told = _decode_told(self._received[_TOLD.size : end])
            self._received = self._received[end:]
            if told.lost:
                self._dead.append(told)
            else:
                self._slow = told
        if lost:
            return self._dead.pop(0) if self._dead else None
        self._slow, slow = None, self._slow
        return slow

    def _run(self) -> None:
        native, sock = self._ring.native, self.socket
        try:
            while True:
                fault, number, offset, nbytes = native.take(self.place, math.inf)
                if fault:  # the group has failed
                    return
                if not number:
                    break
                try:
                    sock.sendall(_LENGTH.pack(nbytes))
                    sock.sendall(self._ring.bytes[offset : offset + nbytes])
                finally:
                    native.give_back(self.place, number)
            sock.sendall(_LENGTH.pack(_END))
            while sock.recv(4096):  # until the relay has read everything
                pass
        except OSError:
            self._cut()

    def _cut(self) -> None:
        """The relay is lost: do not wait for it."""
        if self._ring.native.reads(self.place) and self._ring.native.state == OPEN:
            self._ring.native.leave(self.place)
            lost = self._ring.lost(self._ring.ranks[self.place])
            lost.text += " and its host gets no more messages"
            self._dead.append(lost)


class QueueRelay(_End):
    """Receives messages for the readers of its host, in a thread."""

    @property
    def needed(self) -> bool:
        """Whether other ranks of its host still read what it receives."""
        ring = self._ring
        others = (place for place in range(len(ring.ranks)) if place != ring.place)
        return self.thread.is_alive() and any(map(ring.native.reads, others))

    def _run(self) -> None:
        native, end = self._ring.native, CUT
        try:
            while (nbytes := self._length()) != _END:
                offset = self._room(nbytes)
                self._receive(self._ring.bytes[offset : offset + nbytes])
                native.publish()
            end = CLOSED
        except OSError:
            pass
        finally:
            native.end(end)

    def _length(self) -> int:
        """The bytes of the next message; meanwhile readers may die."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            dead, *found = self._ring.native.look()
            if dead:
                self._tell(self._ring.lost(*found))
        length = bytearray(_LENGTH.size)
        self._receive(memoryview(length))
        nbytes: int = _LENGTH.unpack(length)[0]
        return nbytes

    def _receive(self, room: memoryview) -> None:
        while room:
            got = self.socket.recv_into(room)
            if not got:
                raise ConnectionError("the writer's host has ended the connection")
            room = room[got:]

    def _room(self, nbytes: int) -> int:
        """Where the next message goes; tells the writer of readers that have died, or are slow."""
        patience_s = TELL_AFTER_S
        while True:
            fault, *found = self._ring.native.reserve(nbytes, patience_s)
            if not fault:
                return found[0]
            if self._ring.engine.faulted or fault not in (FaultKind.PEER_LOST, FaultKind.TIMEOUT):
                raise ConnectionError("the group has failed")
            told = self._ring.lost(*found) if fault == FaultKind.PEER_LOST else self._ring.slowest(True)
            if fault == FaultKind.TIMEOUT:
                patience_s = min(2 * patience_s, LONGEST_PATIENCE_S)
            self._tell(told)

    def _tell(self, told: Told | None) -> None:
        if told is not None:
            text = msgspec.msgpack.encode(told)
            self.socket.sendall(_TOLD.pack(len(text)) + text)
