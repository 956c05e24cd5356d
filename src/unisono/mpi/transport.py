"""Messages between this rank and others: the only place where this package meets the engine's messages.

All communicators send through one group, the world. Each has two contexts: for its program's messages, and
for its collectives. `Messages` is the world as one context sees it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from unisono._native import (
    ANY_FORM,
    MOST_CONTEXT_TAG,
    MOST_CONTEXTS,
    GroupBase,
    NativeMessageWork,
    tag_in_context,
)
from unisono.engine.memory.buffers import DTYPES
from unisono.mpi import constants
from unisono.mpi.errors import Exception, check_root, whole
from unisono.mpi.message_spec import Block
from unisono.mpi.progress import Operation, move_all, moving

MOST_TAG = MOST_CONTEXT_TAG
_U8 = DTYPES.index("uint8")
_NOTHING = np.zeros(0, np.uint8)
_FOREVER = float("inf")
worlds: list[World] = []
"""Those that this process is in, its own first."""


def abort(errorcode: int) -> NoReturn:
    """End the job with an exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    for world in worlds:
        world.group.abort()
    os._exit(errorcode & 0xFF or 1)


class World:
    """The group of all ranks, and its engine.

    ids: of its processes, by rank; the same process has the same one in other worlds of this process.
    first: the rank here of rank 0 of COMM_WORLD.
    parent: the intercommunicator with which it began, as long as that is there.
    ends_with: called at its end; None: it ends with the program.
    """

    def __init__(self, group: Any, ids: Sequence[int] = (), ends_with: Any = None) -> None:
        self.group, self.ends_with = group, ends_with
        self.ids = tuple(ids or range(group.size))
        self.first = 0
        self.parent: Any = None
        worlds.append(self)
        self.planner = group._planner
        self.engine = self.planner.engine
        self.engine.raw_messages = True
        self.rank: int = group.rank
        self.size: int = group.size

    def ids_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes of ranks."""
        return tuple(self.ids[rank] for rank in ranks)

    def ranks_of(self, ids: Sequence[int]) -> list[int]:
        """The ranks of processes.

        Raises:
            Exception: one of them is not here.
        """
        if any(one not in self.ids for one in ids):
            raise Exception(constants.ERR_GROUP, "the group has processes of another job")
        return [self.ids.index(one) for one in ids]

    def close(self) -> None:
        """Its end."""
        worlds.remove(self)
        self.group.close()
        if self.ends_with is not None:
            self.ends_with()

    def failure(self, call: str) -> BaseException:
        """The error of what aborted the group."""
        return self.planner.failure(call, self.group.timeout_s, self.engine)


class Messages:
    """The messages of one context. `quick` has the native calls, which return None where they cannot."""

    __slots__ = ("context", "quick", "world")

    def __init__(self, world: World, context: int) -> None:
        self.world, self.context = world, context
        group = world.group
        self.quick = (
            GroupBase(world.planner, world.engine, group.timeout_s, context, group) if context else group
        )

    def send(self, data: Any, peer: int, tag: int) -> None:
        """Send bytes and wait."""
        if moving() or self.quick._send(data, peer, tag, None) is None:
            self.start_send(data, peer, tag).block()

    def start_send(self, data: Any, peer: int, tag: int, synchronous: bool = False) -> Transfer:
        """Begin to send bytes. synchronous: it ends when a receive has matched."""
        work = None if synchronous else self.quick._isend(data, peer, tag, None)
        if work is None:
            work = self._post("isend", peer, tag, data, sending=True, synchronous=synchronous)
        return Transfer(self.world, work)

    def start_receive(self, room: Any, peer: int | None, tag: int, kind: Any, places: Any, *more: Any) -> Any:
        """Begin to receive bytes into memory; `kind` is the class of the transfer."""
        work = self.quick._irecv(room, peer, tag, None)
        if work is None:
            work = self._post("irecv", peer, tag, room, sending=False)
        return kind(self.world, work, places, *more)

    def start_receive_bytes(self, peer: int | None, tag: int, places: Any, load: Any = None) -> Receive:
        """Begin to receive a message of any length: its bytes, or what `load` makes of them."""
        work = self.quick._irecv_bytes(load, peer, tag, None)
        if work is None:
            work = self._post("irecv", peer, tag, _NOTHING, sending=False, sized=True, decode=load)
        return Receive(self.world, work, places)

    def _post(self, name: str, peer: int | None, tag: int, data: Any, **more: Any) -> Any:
        world = self.world
        address = data.__array_interface__["data"][0]
        source = -1 if peer is None else peer
        form = ANY_FORM if more.get("sized") else _U8
        work = NativeMessageWork(
            world.planner, world.engine, name, source, tag_in_context(self.context, tag), form, address,
            data.nbytes, world.group.timeout_s, keep=data, **more,
        )  # fmt: skip
        try:
            work.start(outlives=True)
        except ValueError as error:
            raise Exception(constants.ERR_BUFFER, str(error)) from None
        if not work.ended():
            work.detach()
        return work

    def probe(self, peer: int | None, tag: int) -> Any:
        """Wait for a message; its status."""
        found = None
        while found is None and moving():
            move_all()
            found = self.look(peer, tag)
        if found is None:
            source = -1 if peer is None else peer
            _, found = self.world.engine.probe(source, tag_in_context(self.context, tag), _FOREVER)
        if found is None:
            raise self.world.failure("Probe")
        return found

    def look(self, peer: int | None, tag: int) -> Any:
        """The status of a message that has arrived, or None."""
        source = -1 if peer is None else peer
        fault, found = self.world.engine.look(source, tag_in_context(self.context, tag))
        if fault:
            raise self.world.failure("Iprobe")
        return found


class Transfer(Operation):
    """A send or a receive under way."""

    def __init__(self, world: World, work: Any) -> None:
        self._world, self._work = world, work

    def poll(self) -> bool:
        if self.done:
            return True
        work = self._work
        if not work.done():
            self._world.engine.advance()
            if not work.done():
                return False
        self._finish(work)
        return True

    def block(self) -> None:
        if self.done:
            return
        if moving():
            super().block()
        else:
            self._finish(self._work)

    def _finish(self, work: Any) -> None:
        """Wait for the end, and raise its error."""
        try:
            work.wait()
        except BaseException:
            self.done = work.done()
            raise
        self.done = True
        self._accept(work)

    def _accept(self, work: Any) -> None:
        """What follows the end of a receive; a send has nothing to do."""

    def cancel(self) -> None:
        """See `Operation.cancel`: a receive that no message has matched."""
        self._work.cancel()


class Receive(Transfer):
    """A receive. Its value is the object of a message of any length.

    places: the rank in the communicator of each rank of the world.
    """

    _found: Any = None

    def __init__(self, world: World, work: Any, places: Any) -> None:
        self._world, self._work, self._places = world, work, places

    @property
    def source(self) -> int:  # type: ignore[override]
        """The rank that sent the message."""
        return constants.ANY_SOURCE if self._found is None else int(self._places[self._found.source])

    @property
    def tag(self) -> int:  # type: ignore[override]
        """The message's tag."""
        return constants.ANY_TAG if self._found is None else int(self._found.tag)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes received."""
        return 0 if self._found is None else min(self._found.nbytes, self._work.capacity)

    def _accept(self, work: Any) -> None:
        if work.cancelled:
            self.cancelled = True
            return
        found = self._found = work.receive_status()
        if found.nbytes > work.capacity:
            raise truncated(self.source, self.tag, found.nbytes, work.capacity)
        self.value = work.result()
        self._use()

    def _use(self) -> None:
        """What is done with the message."""


def operation_of(world: World, work: Any, places: Any) -> Transfer:
    """A message under way, for a request."""
    return Receive(world, work, places) if work.receives else Transfer(world, work)


class WholeReceive(Receive):
    """A receive of a collective, whose ranks agree on the number of bytes."""

    def _use(self) -> None:
        room = self._work.capacity
        if self.nbytes < room:
            text = f"rank {self.source} has sent {self.nbytes} bytes, this rank expects {room}"
            raise Exception(constants.ERR_TRUNCATE, f"the ranks' counts or types differ: {text}")


class BlockReceive(Receive):
    """A receive into items of any type. room: the memory that gets their bytes side by side."""

    def __init__(self, world: World, work: Any, places: Any, room: Any, block: Block) -> None:
        super().__init__(world, work, places)
        self._room, self._block = room, block

    def _use(self) -> None:
        if not self._block.dense:
            self._block.fill(self._room[: self.nbytes])


def truncated(source: int, tag: int, sent: int, room: int) -> Exception:
    """The error of a message that is longer than its buffer."""
    text = f"the message from rank {source} with tag {tag} has {sent} bytes, the receive buffer {room}"
    return Exception(constants.ERR_TRUNCATE, text)


def as_bytes(data: Any) -> Any:
    """Bytes-like data as an array."""
    return np.frombuffer(data, np.uint8) if len(data) else _NOTHING


class Lane:
    """Messages to the ranks of a communicator, or of the other side of an intercommunicator.

    rank: of this process, on its side.  size: of the side to which messages go.  peers: its ranks of the
    world.  inter: whether that is another side.  local: the lane of this side.  number: of this call, the
    same on all its ranks.
    """

    __slots__ = ("_messages", "_places", "_tag", "inter", "local", "number", "peers", "rank", "size")

    def __init__(self, messages: Messages, peers: Any, rank: int, size: int, places: Any, tag: int) -> None:
        self._messages, self.peers, self.rank, self.size = messages, peers, rank, size
        self._places, self._tag = places, tag
        self.number = messages.context + tag * (MOST_CONTEXTS + 1)
        self.inter, self.local = False, self

    def role(self, root: int) -> tuple[bool, int | None]:
        """(whether this rank is the root, with which rank it exchanges or None).

        root: between two sides it is ROOT on the root itself, and PROC_NULL on its side.
        """
        if self.inter and root in (constants.ROOT, constants.PROC_NULL):
            return whole(root, "root") == constants.ROOT, None
        if type(root) is not int or not 0 <= root < self.size:
            root = check_root(root, self.size)
        return not self.inter and root == self.rank, root

    def tree(self, root: int) -> tuple[int | None, list[int]]:
        """(the parent, the children with the largest subtrees first) of this rank in a binomial tree."""
        below, step = (self.rank - root) % self.size, 1
        children = []
        while step < self.size and not below & step:
            if below + step < self.size:
                children.append((self.rank + step) % self.size)
            step *= 2
        return (self.rank - step) % self.size if below else None, children[::-1]

    def send(self, rank: int, data: Any) -> Operation:
        """Send bytes."""
        return self._messages.start_send(data, self.peers[rank], self._tag)

    def receive(self, rank: int, room: Any) -> Operation:
        """Receive bytes of a known number into memory."""
        return self._messages.start_receive(room, self.peers[rank], self._tag, WholeReceive, self._places)

    def receive_block(self, rank: int, block: Block) -> Operation:
        """Receive items."""
        room, where = block.room(), (self.peers[rank], self._tag, BlockReceive, self._places)
        return self._messages.start_receive(room, *where, room, block)

    def send_bytes(self, rank: int, data: Any) -> Operation:
        """Send bytes of a number that the receiver does not know."""
        return self.send(rank, as_bytes(data))

    def receive_bytes(self, rank: int) -> Operation:
        """Receive such bytes: they are the operation's value."""
        return self._messages.start_receive_bytes(self.peers[rank], self._tag, self._places)


def copy_block(source: Block, target: Block) -> None:
    """Copy a rank's block for itself."""
    packed = source.pack()
    if packed.size > target.nbytes:
        raise Exception(
            constants.ERR_TRUNCATE, f"{packed.size} bytes for this rank itself, but room for {target.nbytes}"
        )
    target.fill(np.array(packed, copy=True) if target.dense else packed)
