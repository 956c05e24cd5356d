"""Messages of buffers between two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi.addresses import destination, fill_status, origin
from unisono.mpi.comm_state import CommState
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.errors import whole
from unisono.mpi.message import Message
from unisono.mpi.message_spec import Block, simple
from unisono.mpi.partitioned import Parts
from unisono.mpi.progress import Ended, Every, Operation, moving
from unisono.mpi.request import Prequest, Request
from unisono.mpi.status import Status
from unisono.mpi.transport import BlockReceive, Receive, Transfer, truncated


class PointToPoint:
    """The messages of `Comm` that carry buffers."""

    _alive: Any
    _state: Any

    # ---- blocking

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send the items of a buffer."""
        state = self._alive()
        if dest == PROC_NULL:
            return
        peer, full = destination(state, dest, tag)
        if (
            type(buf) is not np.ndarray
            or moving()
            or state.messages.quick._send(buf, peer, full, None) is None
        ):
            state.messages.send(simple(buf, writable=False).pack(), peer, full)

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive items into a buffer."""
        state = self._alive()
        if type(buf) is np.ndarray and source != PROC_NULL and not moving():
            peer, full = origin(state, source, tag)
            found = state.messages.quick._recv(buf, peer, full, None)
            if found is not None:
                self._received(state, found, buf.nbytes, status)
                return
        operation = self._receive(buf, source, tag)
        operation.block()
        fill_status(status, operation)

    @staticmethod
    def _received(state: CommState, found: Any, capacity: int, status: Status | None) -> None:
        """After a receive at once."""
        source, tag, nbytes = state.places[found.source], found.tag, found.nbytes
        if status is not None:
            status._set(source, tag, min(nbytes, capacity))
        if nbytes > capacity:
            raise truncated(source, tag, nbytes, capacity)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send, and wait until a receive has matched."""
        self._send(buf, dest, tag, synchronous=True).block()

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send to a rank that has posted its receive."""
        self._send(buf, dest, tag).block()

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy, and do not wait."""
        self._send(buf, dest, tag, copied=True)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send and receive."""
        operation = self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag)
        operation.block()
        fill_status(status, operation)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send the items of a buffer, and receive into it."""
        operation = self._replace(buf, dest, sendtag, source, recvtag)
        operation.block()
        fill_status(status, operation)

    # ---- non-blocking

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Send`."""
        state = self._state
        if type(buf) is np.ndarray and state is not None and dest != PROC_NULL:  # the fast path
            work = state.messages.quick._isend(buf, *destination(state, dest, tag), None)
            if work is not None:
                return Request._for(Transfer(state.world, work))
        return Request._for(self._send(buf, dest, tag))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Bsend`."""
        self._send(buf, dest, tag, copied=True)
        return Request._for(Ended())

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Ssend`."""
        return Request._for(self._send(buf, dest, tag, synchronous=True))

    Irsend = Isend

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """See `Recv`."""
        state = self._state
        if type(buf) is np.ndarray and state is not None and source != PROC_NULL:  # the fast path
            work = state.messages.quick._irecv(buf, *origin(state, source, tag), None)
            if work is not None:
                return Request._for(Receive(state.world, work, buf.nbytes, state.places))
        return Request._for(self._receive(buf, source, tag))

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """See `Sendrecv`."""
        operation = self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag)
        return Request._for(operation)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """See `Sendrecv_replace`."""
        return Request._for(self._replace(buf, dest, sendtag, source, recvtag))

    # ---- persistent

    def _again(self, start: Any) -> Prequest:
        return Prequest._starting(start)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """See `Send`."""
        self._check_send(buf, dest, tag)
        return self._again(lambda: self._send(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """See `Bsend`."""
        self._check_send(buf, dest, tag)

        def start() -> Operation:
            self._send(buf, dest, tag, copied=True)
            return Ended()

        return self._again(start)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """See `Ssend`."""
        self._check_send(buf, dest, tag)
        return self._again(lambda: self._send(buf, dest, tag, synchronous=True))

    Rsend_init = Send_init

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """See `Recv`."""
        if source != PROC_NULL:
            origin(self._alive(), source, tag)
            simple(buf, writable=True)
        return self._again(lambda: self._receive(buf, source, tag))

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> Prequest:  # noqa: ARG002
        """A message of parts: it is sent when `Prequest.Pready` was called for each."""
        whole_buf = self._of_parts(buf, partitions, writable=False)
        return self._again(lambda: Parts(partitions, lambda: self._send(whole_buf, dest, tag), True))

    def Precv_init(
        self,
        buf: Any,
        partitions: int,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        info: Any = None,  # noqa: ARG002
    ) -> Prequest:
        """Receives a message of parts."""
        whole_buf = self._of_parts(buf, partitions, writable=True)
        return self._again(lambda: Parts(partitions, lambda: self._receive(whole_buf, source, tag), False))

    @staticmethod
    def _of_parts(buf: Any, partitions: int, *, writable: bool) -> Block:
        first = simple(buf, writable=writable, blocks=whole(partitions, "partitions"))
        return Block(first.raw, first.start, first.count * partitions, first.type)

    def _check_send(self, buf: Any, dest: int, tag: int) -> None:
        if dest != PROC_NULL:
            destination(self._alive(), dest, tag)
            simple(buf, writable=False)

    # ---- probing

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Wait for a message. Returns True."""
        state = self._alive()
        if source == PROC_NULL:
            fill_status(status, Ended(PROC_NULL))
            return True
        self._found(state, state.messages.probe(*origin(state, source, tag)), status)
        return True

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message has arrived."""
        state = self._alive()
        if source == PROC_NULL:
            fill_status(status, Ended(PROC_NULL))
            return True
        found = state.messages.look(*origin(state, source, tag))
        if found is not None:
            self._found(state, found, status)
        return found is not None

    @staticmethod
    def _found(state: CommState, found: Any, status: Status | None) -> None:
        if status is not None:
            status._set(state.places[found.source], found.tag, found.nbytes)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message, and take it: only `Message.Recv` receives it."""
        return Message.Probe(self, source, tag, status)

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """As `Mprobe`, but None if none has arrived."""
        return Message.Iprobe(self, source, tag, status)

    # ---- operations

    def _send(
        self, buf: Any, dest: int, tag: int, *, synchronous: bool = False, copied: bool = False
    ) -> Operation:
        state = self._alive()
        if dest == PROC_NULL:
            return Ended()
        peer, full = destination(state, whole(dest, "dest"), whole(tag, "tag"))
        data = simple(buf, writable=False).pack()
        found: Operation = state.messages.start_send(data.copy() if copied else data, peer, full, synchronous)
        return found

    def _receive(self, buf: Any, source: int, tag: int) -> Operation:
        state = self._alive()
        if source == PROC_NULL:
            return Ended(PROC_NULL)
        peer, full = origin(state, whole(source, "source"), whole(tag, "tag"))
        return self._receive_block(simple(buf, writable=True), peer, full)

    def _receive_block(self, block: Block, peer: int | None, tag: int) -> Operation:
        state = self._alive()
        found: Operation = state.messages.start_receive(
            block.room(), peer, tag, BlockReceive, state.places, block
        )
        return found

    def _exchange(
        self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int
    ) -> Operation:
        self._check_send(sendbuf, dest, sendtag)  # before the receive is posted
        receive = self._receive(recvbuf, source, recvtag)
        return Every([receive, self._send(sendbuf, dest, sendtag)])

    def _replace(self, buf: Any, dest: int, sendtag: int, source: int, recvtag: int) -> Operation:
        if source != PROC_NULL:
            origin(self._alive(), source, recvtag)
            simple(buf, writable=True)
        send = self._send(buf, dest, sendtag, copied=True)
        return Every([self._receive(buf, source, recvtag), send])
