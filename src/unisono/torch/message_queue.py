"""The interface of vLLM's `MessageQueue`, over `Group.queue`. docs/queue.md lists what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from unisono.engine.group.group import Group
from unisono.engine.windows.queue import Queue
from unisono.errors import GroupClosed

LEAST_BYTES = 64 << 20
"""The room of a queue at least: objects larger than a chunk go through it, too."""


class MessageQueue:
    """A broadcast queue: one rank enqueues, each other rank dequeues every object.

    A timeout is in seconds; None waits for ever, but a dead process ends the wait.

    Attributes:
        shutting_down: `shutdown` was called here.
    """

    def __init__(self, group: Group, queue: Queue) -> None:
        self._group, self._queue = group, queue
        self.shutting_down = False

    @staticmethod
    def create_from_process_group(
        pg: Any, max_chunk_bytes: int, max_chunks: int, writer_rank: int = 0, *, pickle: bool = False
    ) -> MessageQueue:
        """A queue of all ranks of `pg`, a PyTorch process group of any backend or a `Group`; all call it.

        Args:
            writer_rank: in `pg`.  pickle: send what pickles, too; only among processes that trust each other.
        """
        group = pg
        if not isinstance(pg, Group):
            ranks = dist.get_process_group_ranks(pg)
            made: Any = dist.new_group(ranks, backend="unisono", use_local_synchronization=True)
            group = made._group
        room = max(max_chunk_bytes * max_chunks, LEAST_BYTES)
        return MessageQueue(group, group.queue(writer_rank, bytes=room, pickle=pickle))

    def wait_until_ready(self) -> None:
        """Wait for all ranks; all call it."""
        self._group.barrier()

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object. Raises TimeoutError: a reader is too slow, which the text names."""
        self._check(writes=True, does="enqueue")
        self._queue.put(obj, timeout=math.inf if timeout is None else timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:  # noqa: ARG002
        """The next object, which is the caller's own. Raises TimeoutError; RuntimeError after `shutdown`."""
        self._check(writes=False, does="dequeue")
        return self._read(self._queue.get, timeout, copy=True)

    @contextmanager
    def acquire_read(self, timeout: float | None = None, indefinite: bool = False) -> Iterator[memoryview]:  # noqa: ARG002
        """The encoded bytes of the next object, in place."""
        self._check(writes=False, does="acquire read")
        yield memoryview(self._read(self._queue.read, timeout))

    def _check(self, *, writes: bool, does: str) -> None:
        if writes != (self._group.rank == self._queue.writer):
            raise AssertionError(f"Only {'writers' if writes else 'readers'} can {does}")  # as there

    def _read(self, call: Callable[..., Any], timeout: float | None, **how: bool) -> Any:
        try:
            return call(timeout=math.inf if timeout is None else timeout, **how)
        except GroupClosed as error:
            raise RuntimeError(f"cancelled: {error}") from None

    def broadcast_object(self, obj: Any = None) -> Any:
        """`enqueue` on the writer, `dequeue` elsewhere; returns the object."""
        if self._group.rank != self._queue.writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def shutdown(self) -> None:
        """End it here; a call of another thread that waits raises RuntimeError."""
        self.shutting_down = True
        self._queue.close()
