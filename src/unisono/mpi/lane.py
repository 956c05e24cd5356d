"""`Lane`: the messages of one collective call. Each call has a tag of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono._native import MOST_CONTEXTS
from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.message_spec import Block
from unisono.mpi.progress import Operation
from unisono.mpi.transport import BlockReceive, Messages, WholeReceive, as_bytes


class Lane:
    """Messages to the ranks of a communicator, or of the other side of an intercommunicator.

    rank: of this process, on its side.  size: of the side to which messages go.  peers: its ranks of the
    world.  local: the lane of this side.  number: of this call, the same on all its ranks.
    """

    __slots__ = ("_messages", "_places", "_tag", "local", "number", "peers", "rank", "size")

    def __init__(self, messages: Messages, peers: Any, rank: int, size: int, places: Any, tag: int) -> None:
        self._messages, self.peers, self.rank, self.size = messages, peers, rank, size
        self._places, self._tag = places, tag
        self.number = messages.context + tag * (MOST_CONTEXTS + 1)
        self.local = self

    def send(self, rank: int, data: Any) -> Operation:
        """Send bytes."""
        return self._messages.start_send(data, self.peers[rank], self._tag)

    def receive(self, rank: int, room: Any) -> Operation:
        """Receive bytes of a known number into memory."""
        return self._messages.start_receive(room, self.peers[rank], self._tag, WholeReceive, self._places)

    def send_block(self, rank: int, block: Block) -> Operation:
        """Send items."""
        return self.send(rank, block.pack())

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
