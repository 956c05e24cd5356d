"""Lowercase calls: messages and collectives of any object that pickles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from unisono.mpi import object_schedules
from unisono.mpi.addresses import destination, fill_status, origin
from unisono.mpi.collectives import check_root
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.message import Message
from unisono.mpi.op import OPS
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Ended, Operation, complete, moving
from unisono.mpi.request import Request
from unisono.mpi.status import Status
from unisono.mpi.transport import as_bytes

SUM = OPS["SUM"]


class ObjectMessages:
    """The messages of `Comm` that carry objects."""

    _alive: Any
    Probe: Any
    Iprobe: Any

    def _send_object(self, obj: Any, dest: int, tag: int, synchronous: bool = False) -> Operation:
        state = self._alive()
        if dest == PROC_NULL:
            return Ended()
        peer, full = destination(state, dest, tag)
        data = as_bytes(pickle.dumps(obj))
        found: Operation = state.messages.start_send(data, peer, full, synchronous)
        return found

    def _receive_object(self, source: int, tag: int) -> Operation:
        state = self._alive()
        if source == PROC_NULL:
            return Ended(PROC_NULL)
        found: Operation = state.messages.start_receive_bytes(
            *origin(state, source, tag), state.places, pickle.loads
        )
        return found

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        state = self._alive()
        if dest == PROC_NULL:
            return
        peer, full = destination(state, dest, tag)
        data = pickle.dumps(obj)
        if moving() or state.messages.quick._send(data, peer, full, None) is None:
            state.messages.send(as_bytes(data), peer, full)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until a receive has matched."""
        self._send_object(obj, dest, tag, True).block()

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and do not wait."""
        self._send_object(obj, dest, tag)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object. buf: not used."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=2)
        if source != PROC_NULL and not moving():
            state = self._alive()
            found = state.messages.quick._recv_object(None, *origin(state, source, tag), None)
            if found is not None:
                data, sent = found
                if status is not None:
                    status._set(state.places[sent.source], sent.tag, sent.nbytes)
                return pickle.loads(data)
        operation = self._receive_object(source, tag)
        operation.block()
        fill_status(status, operation)
        return operation.value

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """See `send`."""
        return Request._for(self._send_object(obj, dest, tag))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """See `bsend`."""
        self._send_object(obj, dest, tag)
        return Request._for(Ended())

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """See `ssend`."""
        return Request._for(self._send_object(obj, dest, tag, True))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:  # noqa: ARG002
        """See `recv`."""
        return Request._for(self._receive_object(source, tag))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,  # noqa: ARG002
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send and receive an object."""
        sending = self._send_object(sendobj, dest, sendtag)
        operation = self._receive_object(source, recvtag)
        operation.block()
        sending.block()
        fill_status(status, operation)
        return operation.value

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Wait for a message. Returns True."""
        return bool(self.Probe(source, tag, status))

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message has arrived."""
        return bool(self.Iprobe(source, tag, status))

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message, and take it."""
        return Message.probe(self, source, tag, status)

    def improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """As `mprobe`, but None if no message has arrived."""
        return Message.iprobe(self, source, tag, status)


class ObjectCollectives:
    """The collectives of `Intracomm` that carry objects."""

    _alive: Any
    Barrier: Any

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of the root, on every rank."""
        lane = self._alive().lane()
        return complete(object_schedules.broadcast(lane, obj, check_root(root, lane.size)))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, on the root."""
        lane = self._alive().lane()
        found: list[Any] | None = complete(
            object_schedules.gather(lane, sendobj, check_root(root, lane.size))
        )
        return found

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Object i of the root's list, on rank i."""
        lane = self._alive().lane()
        return complete(object_schedules.scatter(lane, sendobj, check_root(root, lane.size)))

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
        return complete(object_schedules.all_gather(self._alive().lane(), sendobj))

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Object i goes to rank i."""
        return complete(object_schedules.all_to_all(self._alive().lane(), sendobj))

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """The objects of all ranks, reduced in the order of ranks, on the root."""
        lane = self._alive().lane()
        return complete(object_schedules.reduce(lane, sendobj, op, check_root(root, lane.size)))

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """The same on every rank."""
        return complete(object_schedules.all_reduce(self._alive().lane(), sendobj, op))

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """The objects of the ranks up to this one, reduced."""
        return complete(object_schedules.scan(self._alive().lane(), sendobj, op, True))

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """The objects of the ranks below this one, reduced; None on rank 0."""
        return complete(object_schedules.scan(self._alive().lane(), sendobj, op, False))
