"""Lowercase calls: messages and collectives of any object that pickles."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from unisono.mpi import fast_objects as fast_calls
from unisono.mpi import object_schedules as schedules
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from unisono.mpi.errors import whole
from unisono.mpi.fast_objects import Follow
from unisono.mpi.handle import Handle, method
from unisono.mpi.pickling import pickle
from unisono.mpi.point_to_point import MODES, STANDARD, Mode, started
from unisono.mpi.progress import Ended, Operation, begun, complete, under_way
from unisono.mpi.request import Request
from unisono.mpi.status import Status, check_status
from unisono.mpi.transport import as_bytes, operation_of


def collective(doc: str, schedule: Any, fast: Any = None) -> Any:
    """A collective of objects: what `schedule(lane, ...)` returns. fast: the same by the engine's packets."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        state = self._state or self._alive()
        if fast is not None and (group := state.group or state.engine_group()) is not None:
            try:
                return fast(state, group, *args, **options)
            except Follow as follow:
                options["known"] = follow.known
        made = state.planned(lambda lane: begun(schedule(lane, *args, **options)))
        state.calls += fast is not None
        return complete(made)

    call.__name__ = "<lambda>"
    lane, *others = inspect.signature(schedule).parameters.values()
    theirs = [one for one in others if one.kind is not one.KEYWORD_ONLY]
    call.__signature__ = inspect.Signature([lane.replace(name="self"), *theirs])  # type: ignore[attr-defined]
    return method(doc, call)


class Objects(Handle):
    """The messages and collectives of `Comm` that carry objects."""

    _wait: Any
    Barrier: Any

    def _send_object(self, obj: Any, dest: int, tag: int, mode: Mode = STANDARD) -> Operation:
        state = self._alive()
        if dest == PROC_NULL:
            whole(tag, "tag")
            return Ended()
        data = pickle.encode(obj)
        work = state.isend(data, dest, tag, None) if mode is STANDARD else None
        if work is None:
            peer, full = state.destination(dest, tag)
            return started(state, as_bytes(data), peer, full, mode)
        return operation_of(state.world, work, state.places)

    def _receive_object(self, source: int, tag: int) -> Operation:
        state = self._alive()
        if source == PROC_NULL:
            whole(tag, "tag")
            return Ended(PROC_NULL)
        work = None
        if source is not None:
            work = state.irecv_bytes(pickle.loads, None if source == ANY_SOURCE else source, tag, None)
        if work is None:
            peer, full = state.origin(source, tag)
            return state.messages.start_receive_bytes(peer, full, state.places, pickle.loads)
        return operation_of(state.world, work, state.places)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        state = self._state or self._alive()
        if dest == PROC_NULL:
            whole(tag, "tag")
            return
        data = pickle.encode(obj)
        if under_way or state.send(data, dest, tag, None) is None:
            state.messages.send(as_bytes(data), *state.destination(dest, tag))

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """See `send`."""
        return Request._for(self._send_object(obj, dest, tag))

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object. buf: not used."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=2)
        if status is not None:
            check_status(status)
        state = self._state
        if state is not None and source is not None and not under_way:  # type: ignore[redundant-expr]
            found = state.recv_object(None, None if source == ANY_SOURCE else source, tag, None)
            if found is not None:
                data, sent = found
                if status is not None:
                    status._set(state.places[sent.source], sent.tag, sent.nbytes)
                return pickle.decode(data) if len(data) else None
        return self._wait(self._receive_object(source, tag), status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """See `recv`."""
        return Request._for(self._receive_object(source, tag))

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send and receive an object."""
        sending = self._send_object(sendobj, dest, sendtag)
        found = self._wait(self._receive_object(source, recvtag), status)
        sending.block()
        return found

    # ---- collectives

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.Barrier()

    bcast = collective("The object of the root, on every rank.", schedules.broadcast, fast_calls.broadcast)
    gather = collective("The objects of all ranks, on the root.", schedules.gather, fast_calls.gather)
    scatter = collective("Object i of the root's list, on rank i.", schedules.scatter, fast_calls.scatter)
    allgather = collective(
        "The objects of all ranks, on every rank.", schedules.all_gather, fast_calls.all_gather
    )
    alltoall = collective("Object i goes to rank i.", schedules.all_to_all, fast_calls.all_to_all)
    reduce = collective(
        "The objects of all ranks, reduced in their order, on the root.", schedules.reduce, fast_calls.reduce
    )
    allreduce = collective("The same on every rank.", schedules.all_reduce, fast_calls.all_reduce)
    scan = collective("The objects of the ranks up to this one, reduced.", schedules.scan, fast_calls.scan)
    exscan = collective(
        "The same of the ranks below this one; None on rank 0.", schedules.exscan, fast_calls.exscan
    )


def _sends(letter: str, mode: Mode) -> dict[str, Any]:
    """The sends of a mode by their names."""

    def begin(self: Objects, obj: Any, dest: int, tag: int) -> Operation:
        return self._send_object(obj, dest, tag, mode)

    name = f"{letter}send"
    return {
        name: method(mode.doc, lambda self, obj, dest, tag=0: begin(self, obj, dest, tag).block()),
        f"i{name}": method(
            f"See `{name}`.", lambda self, obj, dest, tag=0: Request._for(begin(self, obj, dest, tag))
        ),
    }


for _letter in ("", "s", "b"):
    for _name, _body in _sends(_letter, MODES[_letter]).items():
        if _name not in vars(Objects):
            setattr(Objects, _name, _body)
