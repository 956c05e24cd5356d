"""A queue between hosts: the writer's host sends each message once to every other host.

On the writer's host a `QueueLink` reads the queue as a reader does, and sends what it takes. On another host
a `QueueRelay`, in one of its ranks, receives each message into a queue of that host. Both are threads that
sleep.

    writer -> link:   8 bytes length, the message; or END
    link <- relay:    4 bytes length, a `Told`: a reader that has died, or one that is slow
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unisono import _native
from unisono._native import FaultKind
from unisono.engine.diagnosis.fault_text import signal_name

TELL_AFTER_S = 0.5
"""A relay that waits so long for room tells the writer for which reader; then after twice as long."""

LONGEST_PATIENCE_S = 16.0
"""The longest of these waits."""

_LENGTH, _TOLD = struct.Struct("<Q"), struct.Struct("<I")
_END = 2**64 - 1


class QueueState(IntEnum):
    """As `_native.Queue.state`."""

    OPEN = 0
    CLOSED = 1
    CUT = 2


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

    def view(self, number: int, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A message in place, read-only; it is given back when nobody uses this array any more."""
        return np.asarray(_TakenMessage(self, number, offset, nbytes))

    def slowest(self, locate: bool) -> Told | None:
        """The reader that has not given back the oldest message. locate: ask for its line, see `Queue`."""
        place, number, since_s, taken = self.native.slowest()
        if place < 0:
            return None
        rank = self.ranks[place]
        doing = f"{'holds' if taken else 'has not taken'} message {number} for {since_s:.3g} s"
        line = self.native.line_of(place) if locate else ""
        told = self._told(False, rank, doing + (line and f": it is at {line}"))
        with contextlib.suppress(OSError):  # of another host, or it has ended
            if Path(f"/proc/{told.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                told.text += ": it is stopped (SIGSTOP, a debugger)"
        return told

    def lost(self, rank: int, signal: int, code: int) -> Told:
        """A rank that has died, and how."""
        how = f"ended with exit code {code}" if code >= 0 else "has died"
        return self._told(True, rank, f"was ended by {signal_name(signal)}" if signal else how)

    def _told(self, lost: bool, rank: int, what: str) -> Told:
        pid = self.engine.record_of(rank).pid
        return Told(lost, rank, pid, f"rank {rank} (pid {pid}) {what}")


class _TakenMessage:
    """A message that this rank has: gives it back at its end."""

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
        self._ring, self._socket = ring, sock
        self.thread = threading.Thread(target=self._run, name="unisono queue", daemon=True)

    def close_copy(self) -> None:
        """In a forked child."""
        self._socket.close()

    def _run(self) -> None:
        raise NotImplementedError


class QueueLink(_End):
    """Sends what is put to one other host, in a thread. `place` is that of the host's relay."""

    def __init__(self, ring: QueueMemory, place: int, sock: socket.socket) -> None:
        super().__init__(ring, sock)
        ring.native.join(place)
        self.place, self._received = place, b""
        self._told: dict[bool, list[Told]] = {True: [], False: []}  # by `lost`
        self.thread.start()

    def told(self, lost: bool) -> Told | None:
        """What the relay has told since: of a reader that has died, or of the slowest one."""
        try:
            while more := self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received += more
            self._cut()
        except OSError:  # nothing more has come, or the connection has ended
            pass
        while len(self._received) >= _TOLD.size:
            end = _TOLD.size + _TOLD.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            told = _decode_told(self._received[_TOLD.size : end])
            self._told[told.lost].append(told)
            self._received = self._received[end:]
        found = self._told[lost]
        if not lost:  # the newest counts
            del found[:-1]
        return found.pop(0) if found else None

    def _run(self) -> None:
        native, sock = self._ring.native, self._socket
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
        finally:
            sock.close()

    def _cut(self) -> None:
        """The relay is lost: do not wait for it."""
        if not self._ring.native.reads(self.place) or self._ring.native.state:
            return
        self._ring.native.leave(self.place)
        lost = self._ring.lost(self._ring.ranks[self.place], 0, -1)
        lost.text += " and its host gets no more messages"
        self._told[True].append(lost)


class QueueRelay(_End):
    """Receives messages for the readers of its host, in a thread."""

    def __init__(self, ring: QueueMemory, sock: socket.socket) -> None:
        super().__init__(ring, sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._processes: list[int] = []  # descriptors of the other readers' processes
        for rank in ring.ranks:
            with contextlib.suppress(OSError):  # it has ended: `reserve` finds it
                self._processes.append(os.pidfd_open(ring.engine.record_of(rank).pid))
                self._poll.register(self._processes[-1], select.POLLIN)
        self.thread.start()

    @property
    def needed(self) -> bool:
        """Whether other ranks of its host still read what it receives."""
        ring = self._ring
        others = (place for place in range(len(ring.ranks)) if place != ring.place)
        return self.thread.is_alive() and any(map(ring.native.reads, others))

    def _run(self) -> None:
        native, end = self._ring.native, QueueState.CUT
        try:
            while (nbytes := self._length()) != _END:
                offset = self._room(nbytes)
                self._receive(self._ring.bytes[offset : offset + nbytes])
                native.publish()
            end = QueueState.CLOSED
        except OSError:
            pass
        finally:
            native.end(end)
            self._socket.close()
            for process in self._processes:
                os.close(process)

    def _length(self) -> int:
        """The bytes of the next message; meanwhile readers may die."""
        while self._socket.fileno() not in (ready := [number for number, _ in self._poll.poll()]):
            for process in ready:
                self._poll.unregister(process)
            self._room(0)
        length = bytearray(_LENGTH.size)
        self._receive(memoryview(length))
        nbytes: int = _LENGTH.unpack(length)[0]
        return nbytes

    def _receive(self, room: memoryview) -> None:
        while room:
            got = self._socket.recv_into(room)
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
            if fault == FaultKind.PEER_LOST and not self._ring.engine.faulted:
                told: Told | None = self._ring.lost(*found)
            elif fault == FaultKind.TIMEOUT and not self._ring.engine.faulted:
                told, patience_s = self._ring.slowest(True), min(2 * patience_s, LONGEST_PATIENCE_S)
            else:
                raise ConnectionError("the group has failed")
            if told is not None:
                text = msgspec.msgpack.encode(told)
                self._socket.sendall(_TOLD.pack(len(text)) + text)
