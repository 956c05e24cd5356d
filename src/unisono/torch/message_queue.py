"""The interface of vLLM's `MessageQueue`, over `Group.queue`.

    queue = MessageQueue.create_from_process_group(pg, max_chunk_bytes, max_chunks, writer_rank)

Handles for processes outside of a group are not there. docs/queue.md lists what differs.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from unisono.engine.group.group import Group
from unisono.engine.windows.queue import Queue, fill
from unisono.errors import GroupClosed

_HEADER = struct.Struct(
    "<QQ48x"
)  # the bytes of the object, and how many of them came before; arrays stay aligned


def _end(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


class MessageQueue:
    """A broadcast queue: one rank enqueues, each other rank dequeues every object.

    Attributes:
        shutting_down: `shutdown` was called here.  max_chunk_bytes: larger objects go in several messages.
    """

    def __init__(self, group: Group, queue: Queue, max_chunk_bytes: int) -> None:
        self.max_chunk_bytes = max_chunk_bytes
        self.shutting_down = False
        self._group, self._queue = group, queue

    @staticmethod
    def create_from_process_group(
        pg: Any, max_chunk_bytes: int, max_chunks: int, writer_rank: int = 0, *, pickle: bool = False
    ) -> MessageQueue:
        """A queue of all ranks of `pg`, a PyTorch process group of any backend, or a `Group`; all call it.

        Args:
            writer_rank: in `pg`.  pickle: send what pickles, too; only among processes that trust each other.
        """
        group = pg
        if not isinstance(pg, Group):
            ranks = dist.get_process_group_ranks(pg)
            made: Any = dist.new_group(ranks, backend="unisono", use_local_synchronization=True)
            group = made._group
        room = (max_chunk_bytes + 2 * _HEADER.size) * max_chunks
        queue = group.queue(writer_rank, bytes=max(room, 1 << 12), pickle=pickle)
        return MessageQueue(group, queue, max_chunk_bytes)

    def wait_until_ready(self) -> None:
        """Wait for all ranks; all call it."""
        self._group.barrier()

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object. Raises TimeoutError after `timeout` seconds; None: it waits for the readers."""
        if not self._is_writer:
            raise AssertionError("Only writers can enqueue")
        self._check()
        pieces, most = self._queue.encode(obj), self.max_chunk_bytes
        total = sum(map(len, pieces))
        if total > most:
            whole = memoryview(b"".join(pieces))
            pieces = [whole[start : start + most] for start in range(0, total, most)]
        end, start = _end(timeout), 0
        for group in [pieces] if total <= most else [[piece] for piece in pieces]:
            self._write([_HEADER.pack(total, start), *group], end)
            start += most

    def _write(self, parts: list[Any], end: float) -> None:
        left_s = max(0.0, end - time.monotonic())
        self._queue.write(sum(map(len, parts)), lambda room: fill(room, parts), timeout=left_s)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:  # noqa: ARG002
        """The next object. Raises TimeoutError; RuntimeError after `shutdown`."""
        with self.acquire_read(timeout) as data:
            return self._queue.decode(np.array(data))  # it may outlive the room in the queue

    @contextmanager
    def acquire_read(self, timeout: float | None = None, indefinite: bool = False) -> Iterator[Any]:  # noqa: ARG002
        """The encoded bytes of the next object, in place if they came as one message."""
        if self._is_writer:
            raise AssertionError("Only readers can acquire read")
        end, room, got = _end(timeout), None, 0
        while got == 0 or room is None or got < room.size:
            self._check()
            try:
                data = np.frombuffer(self._queue.read(timeout=max(0.0, end - time.monotonic())), np.uint8)
            except GroupClosed:
                raise RuntimeError("cancelled") from None
            (total, start), part = _HEADER.unpack(data[: _HEADER.size].data), data[_HEADER.size :]
            if part.size == total:
                room = part
                break
            if start == 0:
                room, got = np.empty(total, np.uint8), 0
            if room is not None and start == got:  # otherwise the writer has given an object up
                room[start : start + part.size] = part
                got += part.size
        yield room

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[Any]:
        """`max_chunk_bytes` bytes to write into; the readers get all of them from `acquire_read`."""
        if not self._is_writer:
            raise AssertionError("Only writers can acquire write")
        room = np.zeros(self.max_chunk_bytes, np.uint8)
        yield room.data
        self._write([_HEADER.pack(room.size, 0), room.data], _end(timeout))

    def broadcast_object(self, obj: Any = None) -> Any:
        """`enqueue` on the writer, `dequeue` elsewhere; returns the object."""
        if not self._is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def shutdown(self) -> None:
        """End it here; a call of another thread that waits raises RuntimeError."""
        self.shutting_down = True
        self._queue.close()

    @property
    def _is_writer(self) -> bool:
        return self._group.rank == self._queue.writer

    def _check(self) -> None:
        if self.shutting_down:
            raise RuntimeError("cancelled")
