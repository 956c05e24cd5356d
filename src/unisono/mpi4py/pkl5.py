"""mpi4py.util.pkl5: communicators whose objects are pickled with protocol 5.

An object is one message: its pickle, then its buffers (arrays), each at a multiple of 64 bytes. The
receiver's arrays are views of that message, so a large array is copied once, by the sender.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from unisono import MPI

ALIGNMENT = 64

Pickle = MPI.Pickle
pickle = Pickle()


def dumps(obj: Any, room: Any = b"") -> Any:
    """An object as one message: the number of parts, their sizes, and the parts.

    room: memory for it, which is used if it is large enough.
    """
    data, buffers = pickle.dumps_oob(obj)
    parts = [memoryview(part).cast("B") for part in (data, *buffers)]
    sizes = [part.nbytes for part in parts]
    starts, nbytes = _places(sizes)
    message = memoryview(room)[:nbytes] if len(room) >= nbytes else bytearray(nbytes)
    struct.pack_into(f"{len(parts) + 1}q", message, 0, len(parts), *sizes)
    for start, part in zip(starts, parts, strict=True):
        message[start : start + part.nbytes] = part
    return message


def loads(message: Any) -> Any:
    """The object of a message. Its arrays are views of `message`."""
    memory = memoryview(message).cast("B")
    (count,) = struct.unpack_from("q", memory)
    sizes = struct.unpack_from(f"{count}q", memory, 8)
    parts = [memory[start : start + size] for start, size in zip(_places(sizes)[0], sizes, strict=True)]
    return pickle.loads_oob(parts[0], parts[1:])


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the parts of a message begin, and its size."""
    end, starts = 8 * (len(sizes) + 1), []
    for size in sizes:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + size
    return starts, end


def receive(comm: Any, source: int, tag: int, status: Any = None) -> tuple[bytearray, int]:
    """The next message, not yet an object, and its source."""
    status = MPI.Status() if status is None else status
    found = MPI.Comm.Mprobe(comm, source, tag, status)
    message = bytearray(status.Get_elements(MPI.BYTE))
    found.Recv([message, MPI.BYTE], status)
    return message, status.Get_source()


class _Handles(tuple[Any, ...]):
    """Several handles of MPI as one."""

    _kind: Any
    _null: Any

    def __new__(cls, handle: Any = None) -> Any:
        """Of a handle, of several, or of none: the null one."""
        handle = cls._null if handle is None else handle
        return super().__new__(cls, (handle,) if isinstance(handle, cls._kind) else handle)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, self._kind):
            return all(handle == other for handle in self)
        return tuple.__eq__(self, other) if isinstance(other, type(self)) else NotImplemented

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = tuple.__hash__

    def __bool__(self) -> bool:
        return any(self)


class Request(_Handles):
    """The requests of an object: one, which gives the object when it is done."""

    _kind, _null = MPI.Request, MPI.REQUEST_NULL
    _message: bytearray | None = None

    def Free(self) -> None:  # noqa: N802 (MPI's name)
        """Free the request."""
        for request in self:
            request.Free()

    free = Free

    def cancel(self) -> None:
        """Cancel it, as MPI does: a receive only."""
        for request in self:
            request.Cancel()

    def get_status(self, status: Any = None) -> bool:
        """Whether it is done; it stays as it is."""
        return all(request.Get_status(status) for request in self)

    def test(self, status: Any = None) -> tuple[bool, Any]:
        """Whether it is done, and the object if it is a receive."""
        done = MPI.Request.Testall(list(self), None if status is None else [status])
        return done, self._object() if done else None

    def wait(self, status: Any = None) -> Any:
        """Wait for the end; the object of a receive."""
        MPI.Request.Waitall(list(self), None if status is None else [status])
        return self._object()

    def _object(self) -> Any:
        message, self._message = self._message, None
        return None if message is None else loads(message)

    @classmethod
    def get_status_all(cls, requests: Iterable[Request], statuses: list[Any] | None = None) -> bool:
        """Whether all are done."""
        return all(request.get_status(status) for request, status in _paired(requests, statuses))

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Any] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Whether all are done, and if so their objects."""
        if not cls.get_status_all(requests):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[Any]:
        """Wait for all; their objects."""
        return [request.wait(status) for request, status in _paired(requests, statuses)]


def _paired(requests: Iterable[Request], statuses: list[Any] | None) -> list[tuple[Request, Any]]:
    requests = list(requests)
    if statuses is None:
        return [(request, None) for request in requests]
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(requests) - len(statuses)))
    return list(zip(requests, statuses))  # noqa: B905 (more statuses are allowed)


class Message(_Handles):
    """A message that a probe has matched."""

    _kind, _null = MPI.Message, MPI.MESSAGE_NULL
    _nbytes = 0

    def free(self) -> None:
        """Nothing is left to free."""

    def recv(self, status: Any = None) -> Any:
        """The object of the message."""
        return self.irecv().wait(status)

    def irecv(self) -> Any:
        """Receive it; the request gives the object."""
        (found,) = self
        if found == MPI.MESSAGE_NO_PROC:
            return Request(found.Irecv([None, 0, MPI.BYTE]))
        message = bytearray(self._nbytes)
        request = Request(found.Irecv([message, MPI.BYTE]))
        request._message = message
        return request

    @classmethod
    def probe(
        cls, comm: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Wait for a message, and match it."""
        status = MPI.Status() if status is None else status
        return cls._matched(MPI.Comm.Mprobe(comm, source, tag, status), status)

    @classmethod
    def iprobe(
        cls, comm: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Match a message if there is one; None: there is none."""
        status = MPI.Status() if status is None else status
        return cls._matched(MPI.Comm.Improbe(comm, source, tag, status), status)

    @classmethod
    def _matched(cls, found: Any, status: Any) -> Any:
        if found is None:
            return None
        message = cls(found)
        message._nbytes = status.Get_elements(MPI.BYTE)
        return message


def _sending(name: str, doc: str) -> Any:
    """A method that sends an object with the call of MPI's of this name."""
    call = getattr(MPI.Comm, name)

    def send(self: Comm, obj: Any, dest: int, tag: int = 0) -> Any:
        message = b"" if dest == MPI.PROC_NULL else dumps(obj)
        request = call(self, [message, MPI.BYTE], dest, tag)
        return None if request is None else Request(request)

    send.__name__, send.__qualname__, send.__doc__ = name.lower(), f"Comm.{name.lower()}", doc
    return send


class Comm(MPI.Comm):
    """A communicator whose messages of objects are those of this module. Its collectives are MPI.Comm's."""

    def __new__(cls, comm: Any = None) -> Any:
        """The same communicator as `comm`."""
        return MPI.Comm.__new__(cls, comm)

    send = _sending("Send", "Send an object.")
    bsend = _sending("Bsend", "Send an object from the attached buffer.")
    ssend = _sending("Ssend", "Send an object, and return when its receive has begun.")
    isend = _sending("Isend", "Begin to send an object.")
    ibsend = _sending("Ibsend", "Begin to send an object from the attached buffer.")
    issend = _sending("Issend", "Begin to send an object; the request is done when its receive has begun.")

    def recv(
        self,
        buf: Any = None,  # noqa: ARG002 (a buffer to receive into: arrays are views of what is received)
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> Any:
        """Receive an object."""
        if source == MPI.PROC_NULL:
            return MPI.Comm.Recv(self, [None, 0, MPI.BYTE], source, tag, status)
        return loads(receive(self, source, tag, status)[0])

    def irecv(self, *_args: Any, **_options: Any) -> Any:
        """Refused, as by mpi4py: the size of the object is not known. Use `improbe`."""
        raise RuntimeError("unsupported: the size of an object is not known before; use improbe")

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: Any = None,
    ) -> Any:  # fmt: skip
        """Send one object and receive another."""
        sent = self.isend(sendobj, dest, sendtag)
        came = self.recv(recvbuf, source, recvtag, status)
        sent.wait()
        return came

    def mprobe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        """Wait for a message, and match it."""
        return Message.probe(self, source, tag, status)

    def improbe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        """Match a message if there is one; None: there is none."""
        return Message.iprobe(self, source, tag, status)


class Intracomm(Comm, MPI.Intracomm):
    """An intracommunicator of this module."""


class Intercomm(Comm, MPI.Intercomm):
    """An intercommunicator of this module."""


class _BigMPI:
    """MPI's counts have 32 bits in old libraries, and pkl5 goes around that. Nothing is limited here."""

    blocksize = (1 << 63) - 1

    def __call__(self, buf: Any) -> tuple[Any, int, Any]:
        view = memoryview(buf)
        return view, view.nbytes, MPI.BYTE


_bigmpi = _BigMPI()
