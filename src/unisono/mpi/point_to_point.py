"""Messages of buffers between two ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

from numpy import ndarray

from unisono.mpi.comm_state import CommState
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.errors import whole
from unisono.mpi.handle import Handle, method
from unisono.mpi.message import Message
from unisono.mpi.message_spec import Block, simple
from unisono.mpi.progress import Ended, Every, Operation, Parts, under_way
from unisono.mpi.request import Prequest, Request
from unisono.mpi.status import Status, check_status, fill_status
from unisono.mpi.transport import BlockReceive, truncated


class Mode(NamedTuple):
    """When a send ends. synchronous: when a receive has matched.  copied: at once."""

    doc: str
    synchronous: bool = False
    copied: bool = False


STANDARD = Mode("Send.")
MODES = {
    "": STANDARD,
    "s": Mode("Send, and wait until a receive has matched.", synchronous=True),
    "b": Mode("Send a copy, and do not wait.", copied=True),
    "r": Mode("Send to a rank that has posted its receive."),
}


def started(state: CommState, data: Any, peer: int, tag: int, mode: Mode) -> Operation:
    """Begin to send bytes."""
    found: Operation = state.messages.start_send(
        data.copy() if mode.copied else data, peer, tag, mode.synchronous
    )
    return Ended() if mode.copied else found


class PointToPoint(Handle):
    """The messages of `Comm` that carry buffers."""

    # ---- what calls begin

    def _send(self, buf: Any, dest: int, tag: int, mode: Mode = STANDARD) -> Operation:
        state = self._alive()
        if dest == PROC_NULL:
            whole(tag, "tag")
            return Ended()
        peer, full = state.destination(dest, tag)
        return started(state, simple(buf, writable=False).pack(), peer, full, mode)

    def _receive(self, buf: Any, source: int, tag: int) -> Operation:
        state = self._alive()
        if source == PROC_NULL:
            whole(tag, "tag")
            return Ended(PROC_NULL)
        peer, full = state.origin(source, tag)
        block = simple(buf, writable=True)
        room = block.room()
        return state.messages.start_receive(room, peer, full, BlockReceive, state.places, room, block)

    def _check(self, buf: Any, rank: int, tag: int, *, writable: bool) -> None:
        """Check the arguments of a call that begins later, or after another one."""
        whole(tag, "tag")
        if rank != PROC_NULL:
            state = self._alive()
            (state.origin if writable else state.destination)(rank, tag)
            simple(buf, writable=writable)

    def _exchange(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Operation:  # fmt: skip
        self._check(sendbuf, dest, sendtag, writable=False)
        receive = self._receive(recvbuf, source, recvtag)
        return Every([receive, self._send(sendbuf, dest, sendtag)])

    def _replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Operation:
        self._check(buf, source, recvtag, writable=True)
        copied = buf if dest == PROC_NULL else simple(buf, writable=False).pack().copy()
        return Every([self._receive(buf, source, recvtag), self._send(copied, dest, sendtag)])

    @staticmethod
    def _wait(operation: Operation, status: Status | None) -> Any:
        operation.block()
        fill_status(status, operation)
        return operation.value

    # ---- the fast paths of plain arrays; the other sends are made below

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send the items of a buffer."""
        state = self._state
        if type(buf) is ndarray and state is not None and not under_way and state.send(buf, dest, tag, None):
            return
        state = self._alive()
        if dest == PROC_NULL:
            whole(tag, "tag")
            return
        peer, full = state.destination(dest, tag)
        state.messages.send(simple(buf, writable=False).pack(), peer, full)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Send`."""
        state = self._state
        if type(buf) is ndarray and state is not None:
            work = state.isend(buf, dest, tag, None)
            if work is not None:
                return Request._under_way(work, state)
        return Request._for(self._send(buf, dest, tag))

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive items into a buffer."""
        state = self._state
        if status is not None:
            check_status(status)
        if type(buf) is ndarray and state is not None and source is not None and not under_way:  # type: ignore[redundant-expr]
            found = state.recv(buf, None if source == ANY_SOURCE else source, tag, None)
            if found is not None:
                if status is not None or found.nbytes > buf.nbytes:
                    _received(state, found, buf.nbytes, status)
                return
        self._wait(self._receive(buf, source, tag), status)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """See `Recv`."""
        state = self._state
        if type(buf) is ndarray and state is not None and source is not None:
            work = state.irecv(buf, None if source == ANY_SOURCE else source, tag, None)
            if work is not None:
                return Request._under_way(work, state)
        return Request._for(self._receive(buf, source, tag))

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send and receive."""
        state = self._state
        check_status(status)
        plain = type(sendbuf) is ndarray and type(recvbuf) is ndarray and recvbuf.flags.carray
        if plain and state is not None and source != PROC_NULL and not under_way:
            state.origin(source, recvtag)
            work = state.isend(sendbuf, dest, sendtag, None)
            if work is not None:
                try:
                    self.Recv(recvbuf, source, recvtag, status)
                except Exception:  # too long a message: the other rank still reads what is sent
                    work.wait()
                    raise
                work.wait()
                return
        self._wait(self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag), status)

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send the items of a buffer, and receive into it."""
        self._wait(self._replace(buf, dest, sendtag, source, recvtag), status)

    # ---- requests

    @wraps(_exchange, assigned=())
    def Isendrecv(self, *args: Any, **options: Any) -> Request:
        """See `Sendrecv`."""
        return Request._for(self._exchange(*args, **options))

    @wraps(_replace, assigned=())
    def Isendrecv_replace(self, *args: Any, **options: Any) -> Request:
        """See `Sendrecv_replace`."""
        return Request._for(self._replace(*args, **options))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """See `Recv`."""
        self._check(buf, source, tag, writable=True)
        return Prequest._starting(lambda: self._receive(buf, source, tag))

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> Prequest:
        """A message of parts: it is sent when `Prequest.Pready` was called for each."""
        block = _of_parts(buf, partitions, writable=False)
        self._check(block, dest, tag, writable=False)
        return Prequest._starting(lambda: Parts(partitions, lambda: self._send(block, dest, tag), True))

    def Precv_init(
        self, buf: Any, partitions: int, source: int = ANY_SOURCE, tag: int = ANY_TAG, info: Any = None,
    ) -> Prequest:  # fmt: skip
        """Receives a message of parts."""
        block = _of_parts(buf, partitions, writable=True)
        self._check(block, source, tag, writable=True)
        return Prequest._starting(lambda: Parts(partitions, lambda: self._receive(block, source, tag), False))

    # ---- probing

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Wait for a message. Returns True."""
        return self._probe(source, tag, status, True)

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message has arrived."""
        return self._probe(source, tag, status, False)

    def _probe(self, source: int, tag: int, status: Status | None, waits: bool) -> bool:
        state, found = self._state, None
        if status is not None:
            check_status(status)
        if state is not None and source is not None:
            found = state.peek(None, None if source == ANY_SOURCE else source, tag, None)
        if found is None:
            state = self._alive()
            if source == PROC_NULL:
                whole(tag, "tag")
                fill_status(status, Ended(PROC_NULL))
                return True
            found = (state.messages.probe if waits else state.messages.look)(*state.origin(source, tag))
        if status is not None and found is not None:
            status._set(state.places[found.source], found.tag, found.nbytes)
        return found is not None

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message, and take it: only `Message.Recv` receives it."""
        return Message.Probe(self, source, tag, status)

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """As `Mprobe`, but None if none has arrived."""
        return Message.Iprobe(self, source, tag, status)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe


def _received(state: CommState, found: Any, capacity: int, status: Status | None) -> None:
    """After a receive at once."""
    source, tag, nbytes = state.places[found.source], found.tag, found.nbytes
    if status is not None:
        status._set(source, tag, min(nbytes, capacity))
    if nbytes > capacity:
        raise truncated(source, tag, nbytes, capacity)


def _of_parts(buf: Any, partitions: int, *, writable: bool) -> Block:
    first = simple(buf, writable=writable, blocks=whole(partitions, "partitions"))
    return Block(first.raw, first.start, first.count * partitions, first.type)


def _sends(letter: str, mode: Mode) -> dict[str, Any]:
    """The sends of a mode by their names."""

    def init(self: PointToPoint, buf: Any, dest: int, tag: int = 0) -> Prequest:
        self._check(buf, dest, tag, writable=False)
        return Prequest._starting(lambda: self._send(buf, dest, tag, mode))

    init.__name__ = "<lambda>"
    name = f"{letter}send".capitalize()
    return {
        name: method(mode.doc, lambda self, buf, dest, tag=0: self._send(buf, dest, tag, mode).block()),
        f"I{letter}send": method(
            f"See `{name}`.", lambda self, buf, dest, tag=0: Request._for(self._send(buf, dest, tag, mode))
        ),
        f"{name}_init": method(f"See `{name}`.", init),
    }


for _letter, _mode in MODES.items():
    for _name, _body in _sends(_letter, _mode).items():
        if _name not in vars(PointToPoint):
            setattr(PointToPoint, _name, _body)
