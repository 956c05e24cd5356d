"""Python objects over a group: their encoded bytes travel as arrays of bytes, their lengths first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono.group.calls import named
from unisono.group.coalesced import Coalesced
from unisono.group.messages import Messages

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Lengths = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["Objects"]

Timeout = float | timedelta | None


class Objects(Coalesced, Messages):
    """Operations on objects.

    What can be sent is listed in `unisono.encoding`; anything else is a TypeError that names it. With
    `pickle=True` everything that pickles can be sent, and the receiver runs what the sender wrote:
    only among processes that trust each other.
    """

    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, pickle: bool = False, timeout: Timeout = None
    ) -> Any:
        """The object of rank `src`, on every rank."""
        if self._caller.rank == src:
            encoded = _encoded("broadcast_object", obj, pickle)
            self.broadcast(_length(encoded), src, timeout=timeout)
            self.broadcast(encoded, src, timeout=timeout)
            return obj
        length = _lengths([0])
        self.broadcast(length, src, timeout=timeout)
        encoded = _room(length[0])
        self.broadcast(encoded, src, timeout=timeout)
        return _decoded(encoded, pickle=pickle)

    def all_gather_object(self, obj: Any, *, pickle: bool = False, timeout: Timeout = None) -> list[Any]:
        """The objects of all ranks, in the order of ranks, on every rank."""
        encoded = _encoded("all_gather_object", obj, pickle)
        lengths = _lengths([0] * self._caller.size)
        self.all_gather(lengths, _length(encoded), timeout=timeout)
        parts = [_room(length) for length in lengths]
        self.all_gather_v(parts, encoded, timeout=timeout)
        return [_decoded(part, pickle=pickle) for part in parts]

    def gather_object(
        self, obj: Any, dst: int = 0, *, pickle: bool = False, timeout: Timeout = None
    ) -> list[Any] | None:
        """The objects of all ranks, in the order of ranks, on rank `dst`; elsewhere None."""
        encoded = _encoded("gather_object", obj, pickle)
        if self._caller.rank != dst:
            self.gather(_length(encoded), None, dst, timeout=timeout)
            self.gather(encoded, None, dst, timeout=timeout)
            return None
        lengths = _lengths([0] * self._caller.size)
        self.gather(_length(encoded), lengths, dst, timeout=timeout)
        parts = [_room(length) for length in lengths]
        self.gather(encoded, parts, dst, timeout=timeout)
        return [_decoded(part, pickle=pickle) for part in parts]

    def scatter_object(
        self,
        objs: Sequence[Any] | None = None,
        src: int = 0,
        *,
        pickle: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Object i of the list of rank `src`, on rank i."""
        length = _lengths([0])
        if self._caller.rank == src:
            if objs is None or len(objs) != self._caller.size:
                given = "None" if objs is None else f"{len(objs)} objects"
                raise ValueError(
                    f"scatter_object: got {given}, expected {self._caller.size}: one for every rank"
                )
            parts = [_encoded("scatter_object", obj, pickle) for obj in objs]
            self.scatter(length, _lengths([part.size for part in parts]), src, timeout=timeout)
            self.scatter(_room(parts[src].size), parts, src, timeout=timeout)
            return objs[src]
        self.scatter(length, None, src, timeout=timeout)
        encoded = _room(length[0])
        self.scatter(encoded, None, src, timeout=timeout)
        return _decoded(encoded, pickle=pickle)

    def send_object(
        self, obj: Any, dst: int, tag: int = 0, *, pickle: bool = False, timeout: Timeout = None
    ) -> None:
        """Send an object to rank `dst`."""
        encoded = _encoded("send_object", obj, pickle)
        self.send(_length(encoded), dst, tag, timeout=timeout)
        self.send(encoded, dst, tag, timeout=timeout)

    def recv_object(
        self, src: int | None = None, tag: int = 0, *, pickle: bool = False, timeout: Timeout = None
    ) -> Any:
        """Receive an object from rank `src`, or from anybody (None)."""
        length = _lengths([0])
        source = self.recv(length, src, tag, timeout=timeout)
        encoded = _room(length[0])
        self.recv(encoded, source, tag, timeout=timeout)
        return _decoded(encoded, pickle=pickle)


def _encoded(call: str, obj: Any, pickle: bool) -> Bytes:
    import numpy as np  # here and below: ranks that send no objects start sooner

    from unisono import encoding

    try:
        return np.frombuffer(encoding.encode(obj, pickle=pickle), np.uint8)
    except (TypeError, ValueError) as error:
        raise named(call, error) from None


def _length(encoded: Bytes) -> Lengths:
    return _lengths([encoded.size])


def _lengths(values: list[int]) -> Lengths:
    import numpy as np

    return np.array(values, np.int64)


def _room(nbytes: int) -> Bytes:
    import numpy as np

    return np.empty(nbytes, np.uint8)


def _decoded(data: Any, *, pickle: bool) -> Any:
    from unisono import encoding

    return encoding.decode(data, pickle=pickle)
