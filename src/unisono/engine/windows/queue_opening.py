"""Makes a queue: memory on each host that has readers, and connections between the hosts."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono import _native
from unisono.engine.base.validation import flag, listed, not_negative, whole
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.store import Store
from unisono.engine.store.base import close_in_children
from unisono.engine.windows.opening import connect_members
from unisono.engine.windows.queue import Queue, Terms
from unisono.engine.windows.queue_links import QueueLink, QueueMemory, QueueRelay
from unisono.engine.windows.window import WindowOwner

KEEPS = "all", "latest"
LEAST_BYTES, MOST_BYTES = 1 << 12, 1 << 46
ALIGNMENT = 64
_KIND = "queue"


def open_queue(
    owner: WindowOwner,
    gather: Callable[[Any], list[Any]],
    meeting: tuple[Store, Identity] | None,
    writer: int,
    readers: Sequence[int] | None,
    nbytes: int,
    keep: str,
    spin_s: float,
    join: bool,
    pickle: bool,
) -> Queue:
    """A queue of these ranks; see `Group.queue`. All ranks of the group call it."""
    try:
        terms = _terms(owner, writer, readers, nbytes, keep, pickle)
        spin_s, join = not_negative(spin_s, "queue: spin_s"), flag(join, "queue: join")
    except (TypeError, ValueError) as error:  # the others do not wait for this rank
        gather((f"failed: {type(error).__name__}: {error}", None))
        raise
    for rank, (wrong, other) in enumerate(gather(("", tuple(terms)))):
        if wrong or Terms(*other) != terms:
            raise ValueError(f"queue: rank {rank} {wrong or f'has other arguments: {Terms(*other)}'}")
    writer = terms.writer
    homes = [""] * owner.size
    if meeting is not None:
        homes = [info.memory_domain for info in meeting[1].membership.peers]
    ring, heads, key = _share(owner, gather, homes, terms, spin_s)
    links: list[QueueLink] = []
    relay = None
    if ring is not None and len(heads) > 1 and owner.rank in heads:
        found = connect_members(owner, heads, list(map(str, heads)), meeting, key, (_KIND,)).detach(_KIND)
        sockets = [None if number < 0 else socket.socket(fileno=number) for number in found]
        for rank, sock in zip(heads, sockets, strict=True):
            if sock is None:
                continue
            sock.setblocking(True)
            if owner.rank == writer:
                links.append(QueueLink(ring, ring.ranks.index(rank), sock))
            elif rank == writer:
                relay = QueueRelay(ring, sock)
            else:
                sock.close()
            close_in_children(sock.close)
    if ring is not None and ring.place >= 0 and join:
        ring.native.join(ring.place)
    queue = Queue(owner, ring, terms, links, relay)
    gather(None)  # all readers have joined: they get the first message
    return queue


def _terms(
    owner: WindowOwner, writer: int, readers: Sequence[int] | None, nbytes: int, keep: str, pickle: bool
) -> Terms:
    writer = whole(writer, "queue: writer", 0, owner.size - 1)
    chosen = [rank for rank in range(owner.size) if rank != writer]
    if readers is not None:
        chosen = [
            whole(each, "queue: a reader", 0, owner.size - 1) for each in listed(readers, "queue: readers")
        ]
    if writer in chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"queue: readers are {chosen}: the writer, rank {writer}, is none, and each comes once"
        )
    if keep not in KEEPS:
        raise ValueError(f"queue: keep is {keep!r}, expected one of {', '.join(KEEPS)}")
    nbytes = -(-whole(nbytes, "queue: bytes", LEAST_BYTES, MOST_BYTES) // ALIGNMENT) * ALIGNMENT
    return Terms(writer, tuple(sorted(chosen)), nbytes, keep, flag(pickle, "queue: pickle"))


def _share(
    owner: WindowOwner, gather: Callable[[Any], list[Any]], homes: list[str], terms: Terms, spin_s: float
) -> tuple[QueueMemory | None, list[int], str]:
    """This rank's queue; the rank of each host that owns its memory, the writer first; a new name.

    Raises:
        MemoryError: a rank has no room for the messages; all ranks raise it.
    """
    writer, readers, nbytes, keep, _ = terms
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    apart = list(map(str, range(owner.size)))  # where no process may open another's memory
    for names in (homes, apart):
        firsts = {names[rank]: rank for rank in (*reversed(readers), writer)}
        heads = [writer, *sorted(rank for rank in firsts.values() if rank != writer)]
        head = firsts.get(names[owner.rank], -1)
        places = [rank for rank in readers if names[rank] == names[owner.rank]]
        places += [rank for rank in heads if rank != writer and head == writer]
        size = _native.queue_bytes_before(len(places)) + nbytes
        memory, wrong = -1, ""
        if head == owner.rank:
            try:
                if size > most:  # the system would take all there is, and then end a process
                    raise OSError(errno.ENOMEM, f"the machine has {most}")
                memory = os.memfd_create("unisono-queue", os.MFD_CLOEXEC)
                os.posix_fallocate(memory, 0, size)  # now: later a lack of memory would end the process
            except OSError as error:
                wrong = f"queue: rank {owner.rank} has no {size} bytes of shared memory: {error.strerror}"
        told = gather((os.getpid(), memory, wrong, os.urandom(8).hex()))
        used = owner.rank in (writer, *readers)
        failed = any(each[2] for each in told)
        mapped = _mapped(told[head][0], told[head][1], size) if used and not failed else None
        reached = gather(mapped is not None or not used)
        if memory >= 0:
            os.close(memory)
        if failed:
            raise MemoryError(next(each[2] for each in told if each[2]))
        if all(reached):
            break
    key = f"queue/{told[writer][3]}"
    if mapped is None:
        return None, heads, key
    everything = np.frombuffer(mapped, np.uint8)
    engine = owner.engine
    native = _native.Queue(engine, everything, places, head, keep == "latest", spin_s)
    array = everything[size - nbytes :]
    place = places.index(owner.rank) if owner.rank != writer else -1
    return QueueMemory(engine, native, array, array.data, tuple(places), place), heads, key


def _mapped(pid: int, memory: int, size: int) -> mmap.mmap | None:
    """The memory of another process; None: this process may not open it."""
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
