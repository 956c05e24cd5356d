"""Messages of buffers between two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import constants
from unisono.mpi.comm_state import CommState
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.errors import Exception, whole
from unisono.mpi.message import Message
from unisono.mpi.message_spec import Block, simple
from unisono.mpi.partitioned import Parts
from unisono.mpi.progress import Ended, Every, Operation, moving
from unisono.mpi.request import Prequest, Request
from unisono.mpi.status import Status
from unisono.mpi.transport import MOST_TAG, BlockReceive


def destination(state: CommState, dest: int, tag: int) -> tuple[int, int]:
    """The rank of the world and the tag of a message to a rank.

    Raises:
        Exception: there is no such rank, or no such tag.
    """
    if not 0 <= dest < len(state.peers):
        raise Exception(constants.ERR_RANK, f"dest is {dest}, expected 0..{len(state.peers) - 1}")
    if not 0 <= tag <= MOST_TAG:
        raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
    return state.peers[dest], state.base + tag


def origin(state: CommState, source: int, tag: int) -> tuple[int | None, int]:
    """The rank of the world (None: any) and the tag of a message from a rank.

    Raises:
        Exception: there is no such rank, or no such tag.
    """
    if source != ANY_SOURCE and not 0 <= source < len(state.peers):
        raise Exception(constants.ERR_RANK, f"source is {source}, expected 0..{len(state.peers) - 1}")
    if tag != ANY_TAG and not 0 <= tag <= MOST_TAG:
        raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
    peer = None if source == ANY_SOURCE else state.peers[source]
    return peer, state.any_tag if tag == ANY_TAG else state.base + tag


def fill_status(status: Status | None, operation: Operation) -> None:
    """What a status says of an operation that has ended."""
    if status is not None:
        status._set(operation.source, operation.tag, operation.nbytes, operation.cancelled)


class PointToPoint:
    """The messages of `Comm` that carry buffers."""

    _alive: Any

    # ---- blocking

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send the items of a buffer."""
        state = self._alive()
        if dest == PROC_NULL:
            return
        peer, full = destination(state, dest, tag)
        if type(buf) is not np.ndarray or moving() or state.world.group._send(buf, peer, full, None) is None:
            state.world.send(simple(buf, writable=False).pack(), peer, full)

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive items into a buffer."""
        state = self._alive()
        if type(buf) is np.ndarray and source != PROC_NULL and not moving():
            peer, full = origin(state, source, tag)
            found = state.world.group._recv(buf, peer, full, None)
            if found is not None:
                self._received(state, found, buf.nbytes, status)
                return
        operation = self._receive(buf, source, tag)
        operation.block()
        fill_status(status, operation)

    @staticmethod
    def _received(state: CommState, found: Any, capacity: int, status: Status | None) -> None:
        """After a receive at once."""
        source, tag, nbytes = state.places[found.source], found.tag & MOST_TAG, found.nbytes
        if status is not None:
            status._set(source, tag, min(nbytes, capacity))
        if nbytes > capacity:
            raise Exception(
                constants.ERR_TRUNCATE,
                f"the message from rank {source} with tag {tag} has {nbytes} bytes, the receive buffer {capacity}",
            )

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
        return Request._for(self._send(buf, dest, tag))  # type: ignore[no-any-return]

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Bsend`."""
        self._send(buf, dest, tag, copied=True)
        return Request._for(Ended())  # type: ignore[no-any-return]

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """See `Ssend`."""
        return Request._for(self._send(buf, dest, tag, synchronous=True))  # type: ignore[no-any-return]

    Irsend = Isend

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """See `Recv`."""
        return Request._for(self._receive(buf, source, tag))  # type: ignore[no-any-return]

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
        return Request._for(operation)  # type: ignore[no-any-return]

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """See `Sendrecv_replace`."""
        return Request._for(self._replace(buf, dest, sendtag, source, recvtag))  # type: ignore[no-any-return]

    # ---- persistent

    def _again(self, start: Any) -> Prequest:
        return Prequest._starting(start)  # type: ignore[no-any-return]

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """See `Send`."""
        self._check_send(buf, dest, tag)
        return self._again(lambda: self._send(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """See `Bsend`."""
        self._check_send(buf, dest, tag)
        return self._again(lambda: self._send(buf, dest, tag, copied=True) and Ended())

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
        self, buf: Any, partitions: int, source: int = ANY_SOURCE, tag: int = ANY_TAG, info: Any = None
    ) -> Prequest:  # noqa: ARG002
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
        self._found(state, state.world.probe(*origin(state, source, tag)), status)
        return True

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message has arrived."""
        state = self._alive()
        if source == PROC_NULL:
            fill_status(status, Ended(PROC_NULL))
            return True
        found = state.world.look(*origin(state, source, tag))
        if found is not None:
            self._found(state, found, status)
        return found is not None

    @staticmethod
    def _found(state: CommState, found: Any, status: Status | None) -> None:
        if status is not None:
            status._set(state.places[found.source], found.tag & MOST_TAG, found.nbytes)

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
        found: Operation = state.world.start_send(data.copy() if copied else data, peer, full, synchronous)
        return found

    def _receive(self, buf: Any, source: int, tag: int) -> Operation:
        state = self._alive()
        if source == PROC_NULL:
            return Ended(PROC_NULL)
        peer, full = origin(state, whole(source, "source"), whole(tag, "tag"))
        return self._receive_block(simple(buf, writable=True), peer, full)

    def _receive_block(self, block: Block, peer: int | None, tag: int) -> Operation:
        state = self._alive()
        found: Operation = state.world.start_receive(
            block.room(), peer, tag, BlockReceive, state.places, block
        )
        return found

    def _exchange(
        self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int
    ) -> Operation:
        if dest != PROC_NULL:
            destination(self._alive(), dest, sendtag)
        receive = self._receive(recvbuf, source, recvtag)
        return Every([receive, self._send(sendbuf, dest, sendtag)])

    def _replace(self, buf: Any, dest: int, sendtag: int, source: int, recvtag: int) -> Operation:
        send = self._send(buf, dest, sendtag, copied=True)
        return Every([self._receive(buf, source, recvtag), send])
