"""`Message`: a message that a probe has taken, and that only its own calls receive."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import constants
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.errors import Exception
from unisono.mpi.handle import Handle, State
from unisono.mpi.message_spec import simple
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Ended, Operation
from unisono.mpi.request import Request
from unisono.mpi.status import Status, fill_status


class _Taken(State):
    """The bytes of a message; None: of no rank."""

    def __init__(self, data: Any, operation: Operation) -> None:
        self.data, self.operation = data, operation


class Message(Handle):
    """A message that a probe has taken."""

    _null = constants.ERR_REQUEST

    @classmethod
    def Probe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Wait for a message, and take it."""
        state = comm._alive()
        if source == PROC_NULL:
            fill_status(status, Ended(PROC_NULL))
            return cls(MESSAGE_NO_PROC)
        operation = state.messages.start_receive_bytes(*state.origin(source, tag), state.places)
        operation.block()
        fill_status(status, operation)
        return cls._of(_Taken(operation.value, operation))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """As `Probe`, but None if no message has arrived."""
        found = Status()
        if not comm.Iprobe(source, tag, found):
            return None
        return cls.Probe(comm, found.source, found.tag if source != PROC_NULL else tag, status)

    probe, iprobe = Probe, Iprobe

    def _take(self) -> Any:
        taken = self._alive()
        if self is not MESSAGE_NO_PROC:
            self._state = None
        return taken

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive it into a buffer."""
        operation = self._receive(buf)
        fill_status(status, operation)

    def Irecv(self, buf: Any) -> Request:
        """See `Recv`."""
        return Request._for(self._receive(buf))

    def _receive(self, buf: Any) -> Operation:
        block = None if self == MESSAGE_NO_PROC else simple(buf, writable=True)
        taken = self._take()
        if block is None:
            return Ended(PROC_NULL)
        data = np.frombuffer(taken.data, np.uint8) if len(taken.data) else np.zeros(0, np.uint8)
        if data.size > block.nbytes:
            raise Exception(
                constants.ERR_TRUNCATE, f"the message has {data.size} bytes, the buffer {block.nbytes}"
            )
        block.fill(data)
        found: Operation = taken.operation
        found.value = None
        return found

    def recv(self, status: Status | None = None) -> Any:
        """Receive its object."""
        operation = self._receive_object()
        fill_status(status, operation)
        return operation.value

    def irecv(self) -> Request:
        """See `recv`."""
        return Request._for(self._receive_object())

    def _receive_object(self) -> Operation:
        empty = self == MESSAGE_NO_PROC
        taken = self._take()
        if empty:
            return Ended(PROC_NULL)
        found: Operation = taken.operation
        found.value = pickle.loads(taken.data)
        return found


MESSAGE_NULL = Message()
MESSAGE_NO_PROC: Message = Message._of(_Taken(None, Ended(PROC_NULL)))
