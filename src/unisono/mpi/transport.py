"""Messages between this rank and others: the only place where this package meets the engine's messages.

All communicators send through one group, the world. The upper bits of a tag number the context: each
communicator has one for its program's messages and one for its collectives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.engine.memory.buffers import DTYPES
from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.message_spec import Block
from unisono.mpi.progress import Operation, move_all, moving

TAG_BITS = 20
MOST_TAG = (1 << TAG_BITS) - 1
_U8 = DTYPES.index("uint8")
_NOTHING = np.zeros(0, np.uint8)
_FOREVER = float("inf")
_MOST_KEPT = 64
LARGE = 64 << 10
"""Messages of more bytes move while their rank computes."""


class World:
    """The group of all ranks, and its engine."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.engine = group._planner.engine
        self.engine.raw_messages = True
        self.rank: int = group.rank
        self.size: int = group.size
        self._kept: list[Transfer] = []

    def failure(self, call: str) -> BaseException:
        """The error of what aborted the group."""
        found: BaseException = self.group._planner.failure(call, self.group.timeout_s, self.engine)
        return found

    def keep(self, transfer: Transfer) -> None:
        """Keep a transfer, and its memory, until it has ended, whatever the caller does."""
        if len(self._kept) > _MOST_KEPT:
            self._kept = [one for one in self._kept if not one.over()]
        self._kept.append(transfer)

    def send(self, data: Any, peer: int, tag: int) -> None:
        """Send bytes and wait."""
        if moving() or self.group._send(data, peer, tag, None) is None:
            self.start_send(data, peer, tag).block()

    def start_send(self, data: Any, peer: int, tag: int, synchronous: bool = False) -> Transfer:
        """Begin to send bytes. synchronous: it ends when a receive has matched."""
        address = data.__array_interface__["data"][0]
        nbytes = data.nbytes
        request = self.engine.post_send(peer, tag, _U8, False, address, nbytes, _FOREVER, synchronous)
        return self._begun(Transfer(self, request, data, "Send"), nbytes)

    def start_receive(self, room: Any, peer: int | None, tag: int, kind: Any, *more: Any) -> Any:
        """Begin to receive bytes into memory; `kind` is the class of the transfer."""
        address = room.__array_interface__["data"][0]
        source = -1 if peer is None else peer
        request = self.engine.post_recv(source, tag, _U8, False, address, room.nbytes, _FOREVER)
        return self._begun(kind(self, request, room, "Recv", *more), room.nbytes)

    def _begun(self, transfer: Any, nbytes: int) -> Any:
        if transfer._request is None:
            raise Exception(
                constants.ERR_BUFFER,
                f"{transfer._call}: the buffer shares memory with that of a receive under way on this rank",
            )
        if not transfer._request.done:
            self.keep(transfer)
            if nbytes > LARGE:
                self.engine.detach()
        return transfer

    def probe(self, peer: int | None, tag: int) -> Any:
        """Wait for a message; its status."""
        source = -1 if peer is None else peer
        while moving():
            found = self.look(peer, tag)
            if found is not None:
                return found
            move_all()
        fault, found = self.engine.probe(source, tag, _FOREVER)
        if found is None:
            raise self.failure(f"Probe ({fault})")
        return found

    def look(self, peer: int | None, tag: int) -> Any:
        """The status of a message that has arrived, or None."""
        fault, found = self.engine.look(-1 if peer is None else peer, tag)
        if fault:
            raise self.failure("Iprobe")
        return found


class Transfer(Operation):
    """A send or a receive under way."""

    __slots__ = (
        "_call",
        "_keep",
        "_request",
        "_world",
        "cancelled",
        "done",
        "nbytes",
        "source",
        "tag",
        "value",
    )

    def __init__(self, world: World, request: Any, keep: Any, call: str) -> None:
        self._world, self._request, self._keep, self._call = world, request, keep, call
        self.done = self.cancelled = False
        self.value = None
        self.source, self.tag, self.nbytes = constants.ANY_SOURCE, constants.ANY_TAG, 0

    def over(self) -> bool:
        """Whether the engine has no more to do with its memory."""
        return self._request is None or self._request.done

    def poll(self) -> bool:
        """See `Operation.poll`."""
        if self.done:
            return True
        request = self._request
        if not request.done:
            fault = self._world.engine.wait_request(request, 0.0, False)
            if not request.done:
                if fault and self._world.engine.faulted:
                    raise self._world.failure(self._call)
                return False
        self._finish(request)
        return True

    def block(self) -> None:
        """See `Operation.block`."""
        if self.done:
            return
        if moving():
            super().block()
            return
        request = self._request
        while not request.done:
            if self._world.engine.wait_request(request, _FOREVER, False) and not request.done:
                raise self._world.failure(self._call)
        self._finish(request)

    def _finish(self, request: Any) -> None:
        request.see()
        self.done = True
        self._request = None
        keep, self._keep = self._keep, None
        if request.fault:
            raise self._world.failure(self._call)
        self.cancelled = request.cancelled
        if not self.cancelled:
            self._end(request, keep)

    def _end(self, request: Any, keep: Any) -> None:
        """After it has ended without a fault."""

    def cancel(self) -> None:
        """See `Operation.cancel`: a receive that no message has matched."""
        if not self.done and self._call == "Recv":
            self._world.engine.cancel(self._request)


class Receive(Transfer):
    """A receive of the program's. places: the rank in the communicator of each rank of the world."""

    __slots__ = ("_capacity", "_places")

    def __init__(self, world: World, request: Any, keep: Any, call: str, places: Any) -> None:
        super().__init__(world, request, keep, call)
        self._places, self._capacity = places, keep.nbytes

    def _end(self, request: Any, keep: Any) -> None:
        found = request.status
        self.source, self.tag, self.nbytes = self._places[found.source], found.tag & MOST_TAG, found.nbytes
        if found.nbytes > self._capacity:
            self._excess(request)
        else:
            self._take(keep[: found.nbytes])

    def _excess(self, request: Any) -> None:  # noqa: ARG002
        self.nbytes, sent = self._capacity, self.nbytes
        raise Exception(
            constants.ERR_TRUNCATE,
            f"the message from rank {self.source} with tag {self.tag} has {sent} bytes, the receive buffer {self.nbytes}",
        )

    def _take(self, packed: Any) -> None:
        """Use the bytes."""


class BlockReceive(Receive):
    """A receive into items of any type."""

    __slots__ = ("_block",)

    def __init__(self, world: World, request: Any, keep: Any, call: str, places: Any, block: Block) -> None:
        super().__init__(world, request, keep, call, places)
        self._block = block

    def _take(self, packed: Any) -> None:
        self._block.fill(packed)


class BytesReceive(Receive):
    """A receive of any length: its value is the bytes, or what `load` makes of them."""

    __slots__ = ("_load",)

    def __init__(self, world: World, request: Any, keep: Any, call: str, places: Any, load: Any) -> None:
        super().__init__(world, request, keep, call, places)
        self._load = load

    def _excess(self, request: Any) -> None:
        found = request.take_own()
        self.value = found if self._load is None else self._load(found)

    def _take(self, packed: Any) -> None:  # noqa: ARG002
        self.value = b"" if self._load is None else self._load(b"")


def receive_bytes(world: World, peer: int | None, tag: int, places: Any, load: Any = None) -> BytesReceive:
    """Begin to receive a message of any length."""
    found: BytesReceive = world.start_receive(_NOTHING, peer, tag, BytesReceive, places, load)
    return found


def as_bytes(data: Any) -> Any:
    """Bytes-like data as an array."""
    return np.frombuffer(data, np.uint8) if len(data) else _NOTHING
